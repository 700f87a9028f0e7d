"""[H] Traces: what they say, that a cut one is read and goes on, that threads do not mix lines."""

import json
import threading

from rl_jax.metrics.trace import Span, TraceWriter, merge, read_spans


def test_what_perfetto_reads(tmp_path):
    path = tmp_path / "trainer.json"
    with TraceWriter(path, "trainer") as trace:
        trace.span("cpu:0", "step", 1.5, 2.0, update=3)
        trace.instant("cpu:0", "reset", 2.25)
        trace.counter("queue", "depth", 2.5, 7)
    head, *events, end = path.read_text().split("\n")
    assert (head, end) == ("[", ""), "an array without its end"
    process, device, step, reset, queue, depth = [json.loads(line[:-1]) for line in events]
    assert (process["name"], process["args"]) == ("process_name", {"name": "trainer"})
    assert (device["name"], device["args"]) == ("thread_name", {"name": "cpu:0"})
    assert step == {
        "pid": process["pid"], "tid": device["tid"], "ph": "X", "name": "step", "ts": 1.5e6,
        "dur": 0.5e6, "args": {"update": 3},
    }  # fmt: skip
    assert (reset["ph"], reset["ts"], reset["tid"]) == ("i", 2.25e6, device["tid"])
    assert (queue["args"], queue["tid"]) == ({"name": "queue"}, depth["tid"])
    assert (depth["ph"], depth["args"]) == ("C", {"depth": 7})


def test_spans_come_back_in_order_of_time(tmp_path):
    path = tmp_path / "t.json"
    with TraceWriter(path, "sampler") as trace:
        trace.span("cpu:1", "decode", 2.0, 3.0)
        trace.span("cpu:2", "swap", 0.5, 0.75, version=4)
    assert read_spans(path) == [
        Span("sampler", "cpu:2", "swap", 0.5, 0.75, {"version": 4}),
        Span("sampler", "cpu:1", "decode", 2.0, 3.0, {}),
    ]


def test_on_disk_after_so_many_events(tmp_path):
    path = tmp_path / "t.json"
    trace = TraceWriter(path, "p", buffered=3)
    trace.span("d", "a", 0, 1)
    assert read_spans(path) == []
    trace.span("d", "b", 1, 2)
    assert [s.name for s in read_spans(path)] == ["a", "b"], "with the track's name: three events"
    trace.span("d", "c", 2, 3)
    trace.flush()
    assert len(read_spans(path)) == 3
    trace.close()


def test_a_cut_trace_is_read_up_to_the_cut_and_goes_on_from_there(tmp_path):
    path = tmp_path / "t.json"
    for start in (0, 10):
        with TraceWriter(path, "p") as trace:
            trace.span("d", "a", start, start + 1)
            trace.span("d", "b", start + 1, start + 2)
        path.write_bytes(path.read_bytes()[:-4])
        assert read_spans(path)[-1].name == "a"
    assert [(s.name, s.start) for s in read_spans(path)] == [("a", 0), ("a", 10)]


def test_merged_programs_are_one_whole_array(tmp_path):
    for name in ("trainer", "sampler"):
        with TraceWriter(tmp_path / name, name) as trace:
            trace.span("d", name[0], 0.0, 1.0)
    with (tmp_path / "sampler").open("a") as file:
        file.write('{"ph": "X", "na')
    out = tmp_path / "trace.json"
    merge([tmp_path / "trainer", tmp_path / "sampler"], out)
    assert len(json.loads(out.read_text())) == 6
    assert {(s.process, s.name) for s in read_spans(out)} == {("trainer", "t"), ("sampler", "s")}
    merge([], out)
    assert json.loads(out.read_text()) == [] and read_spans(out) == []


def test_threads_do_not_mix_their_lines(tmp_path):
    with TraceWriter(tmp_path / "t", "p", buffered=5) as trace:

        def tell(track: str) -> None:
            for i in range(200):
                trace.span(track, "a", i, i + 1)

        threads = [threading.Thread(target=tell, args=(f"d{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    spans = read_spans(tmp_path / "t")
    for i in range(4):
        assert [s.start for s in spans if s.track == f"d{i}"] == list(range(200))
