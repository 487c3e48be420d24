"""Reading engines' metrics: the few numbers wanted, from real-shaped expositions; absent is never zero."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.engine_metrics import DIALECTS, EngineReport, parse_metrics

VLLM_TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0"} 1000.0
vllm:prefix_cache_hits_total{engine="0"} 800.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1024",x="a\\"b}"} 1.0
process_start_time_seconds 1.7e+09
homing_worker_kv_blocks{state="free"} 1000
homing_worker_kv_blocks{state="cached"} 24
"""


def test_vllm_numbers_are_summed_over_labels() -> None:
    """Two data-parallel ranks are one backend; longer names that begin alike are not mixed in."""
    report = parse_metrics(VLLM_TEXT, DIALECTS["vllm"])
    assert report == EngineReport(
        start_time_s=1.7e9,
        num_running=5.0,
        num_waiting=1.0,
        kv_usage=0.25,
        prefix_queries=1000.0,
        prefix_hits=800.0,
        kv_capacity_tokens=16 * 1024,
        kv_block_tokens=16,
        blocks={"free": 1000, "cached": 24},
    )


def test_tokens_that_an_engine_tells_are_not_derived() -> None:
    """N24: of hybrid models, blocks times their size is several times too much."""
    line = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="20000",kv_cache_size_tokens="%s"} 1.0\n'
    assert parse_metrics(line % "80000", DIALECTS["vllm"]).kv_capacity_tokens == 80_000
    for odd in ("", "0", "-1", "many"):
        assert parse_metrics(line % odd, DIALECTS["vllm"]).kv_capacity_tokens == 320_000


def test_sglang_names_and_capacity() -> None:
    """SGLang reports its capacity as a gauge of tokens."""
    text = 'sglang:num_running_reqs{model_name="m"} 4\nsglang:max_total_num_tokens 65536\n'
    report = parse_metrics(text, DIALECTS["sglang"])
    assert (report.num_running, report.kv_capacity_tokens) == (4.0, 65536)


def test_what_is_not_reported_is_absent() -> None:
    """An empty page says nothing, not zero; nor do NaN and infinity."""
    assert parse_metrics("", DIALECTS["vllm"]) == EngineReport()
    report = parse_metrics("vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc +Inf\n", DIALECTS["vllm"])
    assert report == EngineReport()


@given(st.text(alphabet='vl:m_numreqsti{}="\\ 0.9\n#', max_size=400))
def test_no_text_makes_the_parser_fail(text: str) -> None:
    """An engine that answers nonsense costs nothing but its own numbers."""
    for dialect in DIALECTS.values():
        parse_metrics(text + '\nvllm:cache_config_info{block_size="x",num_gpu_blocks="1"} 1', dialect)
