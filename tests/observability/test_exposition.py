"""The page is what prometheus_client's own parsers read, in both formats, whatever the names are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.observability.exposition import OPEN_METRICS, TEXT, content_type_for, render
from gateway.observability.series import Counter, Gauge, Histogram, Series


def read_back(families: list[Series[Any]], content_type: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Sample name and label values → number, by the library's parser."""
    parse = parse_open_metrics if content_type == OPEN_METRICS else parse_text
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in parse(render(families, content_type).decode())
        for sample in family.samples
    }


@given(st.dictionaries(st.tuples(st.text(), st.text()), st.integers(0, 10**9).map(float), max_size=5))
def test_hostile_label_values_come_back_as_they_are(cells: dict[str | tuple[str, ...], float]) -> None:
    """Quotes, backslashes, line breaks and braces in a value neither break a line nor forge one."""
    counter = Counter("homing_x", "text", "backend", "code")
    counter.update(cells)
    expected = {("homing_x_total", labels): number for labels, number in cells.items()}
    assert read_back([counter], OPEN_METRICS) == expected
    assert read_back([counter], TEXT) == expected


def test_a_histogram_is_cumulative() -> None:
    """Each bucket counts all that is at most its bound; +Inf counts all, like `_count`."""
    histogram = Histogram("homing_h", "text", "api", bounds=(0.1, 1.0))
    for value in (0.05, 0.5, 0.5, 7.0):
        histogram.observe(value, "chat")
    for content_type in (TEXT, OPEN_METRICS):
        assert read_back([histogram], content_type) == {
            ("homing_h_bucket", ("chat", "0.1")): 1.0,
            ("homing_h_bucket", ("chat", "1.0")): 3.0,
            ("homing_h_bucket", ("chat", "+Inf")): 4.0,
            ("homing_h_count", ("chat",)): 4.0,
            ("homing_h_sum", ("chat",)): 8.05,
        }


def test_exemplars_are_on_the_open_metrics_page_only() -> None:
    """A bucket shows the trace of its last observation; the older format has no place for it."""
    histogram = Histogram("homing_h", "text", bounds=(0.1, 1.0))
    histogram.observe(0.5)
    histogram.remember(0.5, (), "4bf92f3577b34da6a3ce929d0e0e4736", 1_700_000_000.25)
    families = list(parse_open_metrics(render([histogram], OPEN_METRICS).decode()))
    exemplars = [one.exemplar for one in families[0].samples if one.exemplar is not None]
    assert len(exemplars) == 1
    assert exemplars[0].labels == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert exemplars[0].value == 0.5
    assert b"trace_id" not in render([histogram], TEXT)


def test_a_metric_without_series_still_has_its_type() -> None:
    """A page names every metric from the start, so a dashboard can be built before the first request."""
    page = render([Counter("homing_x", "text"), Gauge("homing_g", "text")], TEXT).decode()
    assert "# TYPE homing_x_total counter" in page
    assert "# TYPE homing_g gauge" in page


def test_the_format_is_what_the_scraper_accepts() -> None:
    """Prometheus asks for OpenMetrics by its media type; anything else gets the text format."""
    prometheus = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    assert content_type_for(prometheus) == OPEN_METRICS
    assert content_type_for("*/*") == content_type_for("") == TEXT
