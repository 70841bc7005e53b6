"""Convert between messages, text and token ids; the only user of tokenizers and chat templates."""

from treadle.chat.codec import Codec, load_codec

__all__ = ["Codec", "load_codec"]
