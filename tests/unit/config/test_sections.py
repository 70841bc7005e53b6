def test_the_arguments_of_a_server_are_those_of_its_table(make_config):
    config = make_config(rollout_engine="vllm", vllm={"max_model_len": 5})
    assert config.engine.arguments("vllm") == {"max_model_len": 5}
    assert config.engine.arguments("sglang") == config.engine.arguments("torch") == {}
