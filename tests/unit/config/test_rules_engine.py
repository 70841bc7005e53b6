"""Rules about engines that are servers."""

import pytest

from treadle.config import check_config
from treadle.errors import ConfigError

VLLM = {"rollout_engine": "vllm"}
SGLANG = {"rollout_engine": "sglang"}


@pytest.fixture
def findings(make_config):
    """`findings(**fields)`: the text of everything the rules find, faults included."""

    def find(**fields):
        base = {
            "hf_checkpoint": "m",
            "prompt_data": ("a.jsonl",),
            "rm_type": ("regex",),
            "rm_regex": "x",
            "num_rollout": 1,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
        }
        try:
            return "\n".join(check_config(make_config(**base, **fields)))
        except ConfigError as error:
            return str(error)

    return find


def test_a_plain_run_with_vllm_has_no_findings(findings):
    assert (
        findings(**VLLM, engine_python="p", vllm={"enforce_eager": True}, max_restarts=5, weight_transport="disk") == ""
    )


@pytest.mark.parametrize("transport", ["auto", "shm", "disk", "broadcast", "cuda_ipc"])
def test_a_server_takes_weights_by_most_transports(findings, transport):
    assert findings(**VLLM, weight_transport=transport) == findings(**SGLANG, weight_transport=transport) == ""


@pytest.mark.parametrize("address", ["a:1", "a.b-c:80", "10.0.0.1:8000", "[::1]:80", "http://a", "https://a.b:1/x"])
def test_an_address_is_a_host_and_a_port_or_a_url(findings, address):
    assert findings(**VLLM, rollout_external_engine_addrs=(address,)) == ""


def test_arguments_that_only_sound_like_secrets_are_passed_on(findings):
    given = {"max_num_batched_tokens": "4", "speculative_token_map": "p", "ssl_keyfile": "p", "x_per_token": "3"}
    assert findings(**VLLM, vllm={**given, "return_tokens_as_token_ids": True, "tokenizer": "p"}) == ""


def test_a_plain_run_with_sglang_has_no_findings(findings):
    assert findings(**SGLANG, engine_python="p", sglang={"mem_fraction_static": 0.4}) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine_python": "p"}, "engine_python does nothing with rollout_engine = torch"),
        ({"vllm": {"x": "1"}}, "vllm does nothing with rollout_engine = torch"),
        ({"rollout_external_engine_addrs": ("a:1",)}, "rollout_external_engine_addrs does nothing"),
        ({**VLLM, "vllm": {"max-num-seqs": "3"}}, "--vllm-max-num-seqs can't be given"),
        ({**VLLM, "vllm": {"trust_remote_code": True}}, "--vllm-trust-remote-code would run code"),
        ({**VLLM, "vllm": {"hf_token": "hf_x"}}, "--vllm-hf-token holds a secret"),
        ({**VLLM, "vllm": {"hf-token": "hf_x"}}, "set the server's variable in the environment"),
        ({**SGLANG, "sglang": {"ssl_keyfile_password": "x"}}, "--sglang-ssl-keyfile-password holds a secret"),
        ({**VLLM, "vllm": {"loader": '{"aws": {"secretKey": "x"}}'}}, "--vllm-loader.aws.secretKey holds a secret"),
        ({**VLLM, "vllm": {"otlp_endpoint": "http://me:pw@x"}}, "--vllm-otlp-endpoint holds a secret"),
        *(
            ({**VLLM, "rollout_external_engine_addrs": (address,)}, f"rollout_external_engine_addrs has {part}")
            for address, part in {
                "nonsense": "nonsense, which has no port; give host:port",
                "": "'', which is no address",
                "a b:1": "a b:1, which is no address",
                "host:99999": "host:99999, which is no address (Port out of range 0-65535)",
                "host:x": "host:x, which is no address (Port could not be cast",
                "host:0": "host:0, which is no address",
                "ftp://host:1": "ftp://host:1, and servers speak http",
                "http://": "http://, which is no address",
                "[::1:80": "[::1:80, which is no address",
                "me:hush@host:1": "…@host:1, with a user or a password",
                "http://me:hush@host:1": "…@host:1, with a user or a password",
            }.items()
        ),
        ({**SGLANG, "sglang": {"trust-remote-code": True}}, "--sglang-trust-remote-code would run code"),
        ({**SGLANG, "sglang": {"model-path": "x"}}, "--sglang-model-path can't be given"),
        ({**SGLANG, "vllm": {"x": "1"}}, "vllm does nothing with rollout_engine = sglang; set rollout_engine = vllm"),
        ({**VLLM, "sglang": {"x": "1"}}, "sglang does nothing with rollout_engine = vllm"),
        ({**VLLM, "weight_transport": "disk-delta"}, "weight_transport = disk-delta does not reach servers of vLLM"),
        (
            {**SGLANG, "weight_transport": "disk-delta"},
            "weight_transport = disk-delta does not reach servers of SGLang",
        ),
        ({**VLLM, "rollout_external_engine_addrs": ("a:1", "a:1")}, "names a server twice"),
        (
            {**VLLM, "rollout_external_engine_addrs": ("a:1",), "vllm": {"x": True}},
            "vllm does nothing with rollout_ext",
        ),
        (
            {**VLLM, "rollout_external_engine_addrs": ("a:1", "b:1"), "runtime": "ray"},
            "names 2 servers and the run has 1 engines; set rollout_num_gpus = 2",
        ),
    ],
)
def test_findings(findings, fields, message):
    assert message in findings(**fields)
