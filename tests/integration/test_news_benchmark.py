"""The news benchmark, small: four real sender processes, every completion counted once."""

from benchmarks._news import NUM_SENDERS, measure_latency, measure_throughput


async def test_every_completion_of_four_processes_is_counted_once(tmp_path):
    result = await measure_throughput(f"unix://{tmp_path}/s", num_each=5000)
    assert result.num_items == NUM_SENDERS * 5000
    assert result.num_wrong == 0
    assert result.items_per_frame > 1, "coalescing"


async def test_a_lone_completions_way_is_measured():
    assert await measure_latency(num_items=200) > 0
