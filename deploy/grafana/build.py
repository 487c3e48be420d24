"""Generates the Grafana dashboards: `python deploy/grafana/build.py`.

Grafana reads the JSON files, which are kept in the repository. Generating them ensures that every panel has a
title, a unit and one sentence of explanation, and that all dashboards look alike. A test rebuilds and
compares them, and checks every metric against gateway/observability/METRICS.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import LegendDisplayMode, StackingMode, TooltipDisplayMode

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
HALF, SIXTH = 12, 4  # of a width of 24

Panels = tuple[timeseries.Panel | stat.Panel, ...]


class Curve(NamedTuple):
    """One query and the legend of its lines."""

    expr: str
    legend: str


def curves(title: str, unit: str, text: str, *queries: Curve, is_stacked: bool = False) -> timeseries.Panel:
    """A panel with lines over time, stacked if they add up to a whole."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .unit(unit)
        .min(0)
        .span(HALF)
        .height(8)
        .datasource(SOURCE)
        .fill_opacity(30 if is_stacked else 8)
        .legend(common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if unit == "percentunit":
        panel = panel.max(1)
    for query, ref_id in zip(queries, "ABCDEF", strict=False):
        panel = panel.with_target(_target(query, ref_id))
    return panel


def number(title: str, unit: str, text: str, query: Curve) -> stat.Panel:
    """A panel with one number."""
    panel = stat.Panel().title(title).description(text).unit(unit).span(SIXTH).height(4).datasource(SOURCE)
    latest = common.ReduceDataOptions().calcs(["lastNotNull"])
    return panel.reduce_options(latest).with_target(_target(query, "A"))


def _target(query: Curve, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend)
    return target.ref_id(ref_id).datasource(SOURCE)


def quantile(share: float, metric: str, by: str = "") -> str:
    """A quantile of a histogram over the last minutes."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))"


def rate(metric: str, by: str = "") -> str:
    """Events per second, summed over gateways."""
    grouping = f" by ({by}) " if by else ""
    return f"sum{grouping}(rate({metric}[$__rate_interval]))"


STORE_TIME, STORE_CALLS = "homing_session_store_call_seconds_total", "homing_session_store_calls_total"

# The state and use of the fleet.
FLEET = (
    number(
        "Backends that can serve",
        "none",
        "Backends that are ready, degraded or cordoned.",
        Curve("homing:backends_ready:count", ""),
    ),
    number("Requests per second", "reqps", "Sum of all gateways.", Curve(rate("homing_requests_total"), "")),
    number("Requests in flight", "none", "Streams included.", Curve("sum(homing_requests_in_flight)", "")),
    number(
        "Failed requests",
        "percentunit",
        "Share of 5xx in the last five minutes, without client errors.",
        Curve("homing:errors:ratio_rate5m", ""),
    ),
    number(
        "Prompt tokens from cache",
        "percentunit",
        "Share of prompt tokens that engines found in their cache.",
        Curve("homing:hit_rate:ratio_rate5m", ""),
    ),
    number(
        "Sessions",
        "none",
        "Bound sessions known to one gateway.",
        Curve("max(homing_sessions)", ""),
    ),
    curves(
        "Backends by state",
        "none",
        "Each backend is in one state; if gateways disagree, it counts in several.",
        Curve("sum by (state) (max by (backend, state) (homing_backend_state))", "{{state}}"),
        is_stacked=True,
    ),
    curves(
        "Requests in flight by backend",
        "none",
        "With even load the lines are close together, but sessions differ, so they do not coincide.",
        Curve("sum by (backend) (homing_backend_in_flight)", "{{backend}}"),
    ),
    curves(
        "Failed attempts by backend",
        "reqps",
        "Another backend may have answered the request.",
        Curve(rate("homing_upstream_errors_total", "backend, code"), "{{backend}} {{code}}"),
    ),
    curves(
        "Restarts",
        "none",
        "New epochs of each backend's cache in the last hour; each loses the cached history of its sessions.",
        Curve("max by (backend) (changes(homing_backend_epoch[1h]))", "{{backend}}"),
    ),
    curves(
        "Queued requests",
        "none",
        "Requests that wait for capacity in the gateway or on their home.",
        Curve("sum(homing_queue_depth)", "waiting"),
    ),
    curves(
        "Refused requests by cause",
        "reqps",
        "Answered with 429 or 503 and Retry-After.",
        Curve(rate("homing_admission_rejections_total", "cause"), "{{cause}}"),
    ),
    curves(
        "Event loop delay of the gateways",
        "s",
        "Maximum delay in half a minute. Causes: too little CPU, or something that blocks the loop.",
        Curve("max by (instance) (homing_event_loop_lag_seconds)", "{{instance}}"),
    ),
    curves(
        "CPU of the gateways",
        "none",
        "Cores used by all processes of an instance.",
        Curve('rate(process_cpu_seconds_total{job="homing"}[$__rate_interval])', "{{instance}}"),
    ),
    curves(
        "Memory of the gateways",
        "bytes",
        "Resident memory of all processes of an instance.",
        Curve('process_resident_memory_bytes{job="homing"}', "{{instance}}"),
    ),
    curves(
        "Time spent waiting for the session store",
        "s",
        "Mean duration of round trips that requests waited for.",
        Curve(f"{rate(STORE_TIME)} / {rate(STORE_CALLS)}", "mean"),
    ),
    curves(
        "Session store errors",
        "ops",
        "Failed calls by kind; requests continue without the store.",
        Curve(rate("homing_session_store_errors_total", "kind"), "{{kind}}"),
        Curve("max(homing_session_store_degraded)", "degraded"),
    ),
    curves(
        "Configuration generation",
        "none",
        "Grows with each reload and is 1 after a restart.",
        Curve("max by (instance) (homing_config_generation)", "{{instance}}"),
    ),
    curves(
        "Lost log lines",
        "ops",
        "If above 0, the reader of the gateways' standard error is too slow or has gone.",
        Curve(rate("homing_log_lines_lost_total", "instance"), "{{instance}}"),
    ),
)


# Whether turns find their history.
SESSIONS = (
    curves(
        "Prompt tokens from cache",
        "percentunit",
        "Found: reported by engines. Expected: predicted by routing.",
        Curve("homing:hit_rate:ratio_rate5m", "found"),
        Curve(
            "sum(rate(homing_expected_cached_tokens_total[5m])) / sum(rate(homing_prompt_tokens_total[5m]))",
            "expected",
        ),
    ),
    curves(
        "Prompt tokens from cache by turn",
        "percentunit",
        "First turns can only share a system prompt; from the second turn on it should be high.",
        Curve("homing_turn:hit_rate:ratio_rate5m", "turn {{turn}}"),
    ),
    curves(
        "Prompt tokens from cache by backend",
        "percentunit",
        "If a backend is far below the others, its cache may be too small for its sessions.",
        Curve("homing_backend:hit_rate:ratio_rate5m", "{{backend}}"),
    ),
    curves(
        "Prompt tokens",
        "none",
        "Tokens per second, computed or found in a cache.",
        Curve(f"{rate('homing_prompt_tokens_total')} - {rate('homing_cached_tokens_total')}", "computed"),
        Curve(rate("homing_cached_tokens_total"), "from cache"),
        is_stacked=True,
    ),
    curves(
        "Recomputed tokens by cause",
        "none",
        "Tokens per second. evicted: the home had evicted them. Other causes: another backend answered.",
        Curve(rate("homing_recomputed_tokens_total", "cause"), "{{cause}}"),
        is_stacked=True,
    ),
    curves(
        "Sessions that moved, by reason",
        "ops",
        "Each move recomputes the history, unless the new home has it.",
        Curve(rate("homing_session_moves_total", "reason"), "{{reason}}"),
        is_stacked=True,
    ),
    curves(
        "Requests by affinity",
        "reqps",
        "hit: served at home. unpinned: the request has no session.",
        Curve(rate("homing_affinity_total", "affinity"), "{{affinity}}"),
        is_stacked=True,
    ),
    curves(
        "Requests by key source",
        "reqps",
        "header and body are reliable; fingerprint is a guess from the first turn.",
        Curve(rate("homing_affinity_total", "key_source"), "{{key_source}}"),
        is_stacked=True,
    ),
    curves(
        "Distrusted keys",
        "reqps",
        "Keys that too many conversations share, or that never repeat.",
        Curve(rate("homing_distrusted_keys_total", "kind"), "{{kind}}"),
    ),
    curves(
        "Answers without token counts",
        "reqps",
        "They are not included in the ratios above.",
        Curve(rate("homing_usage_unknown_total", "what"), "{{what}}"),
    ),
    curves(
        "Session lookups",
        "ops",
        "local: answered from the gateway's own copy.",
        Curve(rate("homing_session_store_lookups_total", "source"), "{{source}}"),
        is_stacked=True,
    ),
    curves(
        "Sessions dropped from a full table",
        "ops",
        "If above 0, raise sessions.max_sessions.",
        Curve(rate("homing_session_store_evictions_total"), "evicted"),
    ),
)


TTFT, OVERHEAD = "homing_time_to_first_token_seconds", "homing_gateway_overhead_seconds"

# What clients experience.
REQUESTS = (
    curves(
        "Requests by API",
        "reqps",
        "Sum of all gateways.",
        Curve(rate("homing_requests_total", "api"), "{{api}}"),
        is_stacked=True,
    ),
    curves(
        "Requests by status",
        "reqps",
        "499: the client left before its answer was complete.",
        Curve(rate("homing_requests_total", "status"), "{{status}}"),
        is_stacked=True,
    ),
    curves(
        "What became of requests",
        "reqps",
        "A stream that breaks keeps its status of 200: here it counts as failed.",
        Curve(rate("homing_requests_total", "outcome"), "{{outcome}}"),
        is_stacked=True,
    ),
    curves(
        "Time to first token",
        "s",
        "Streams only, measured from the request's arrival at the gateway.",
        Curve(quantile(0.5, TTFT), "median"),
        Curve(quantile(0.95, TTFT), "95 %"),
        Curve(quantile(0.99, TTFT), "99 %"),
    ),
    curves(
        "Time to first token by turn",
        "s",
        "Median. Later turns have longer prompts; lines stay flat if the cache works.",
        Curve(quantile(0.5, TTFT, "turn"), "turn {{turn}}"),
    ),
    curves(
        "Time between tokens",
        "s",
        "Distribution of the mean of each answer.",
        Curve(quantile(0.5, "homing_inter_token_seconds"), "median"),
        Curve(quantile(0.95, "homing_inter_token_seconds"), "95 %"),
    ),
    curves(
        "Request duration by API",
        "s",
        "95 % of requests are shorter.",
        Curve(quantile(0.95, "homing_request_duration_seconds", "api"), "{{api}}"),
    ),
    curves(
        "Gateway overhead",
        "s",
        "Time from arrival to the first byte sent to a backend, without waiting in the queue.",
        Curve(quantile(0.5, OVERHEAD), "median"),
        Curve(quantile(0.99, OVERHEAD), "99 %"),
    ),
    curves(
        "Time in the queue",
        "s",
        "Only requests that had to wait.",
        Curve(quantile(0.5, "homing_queue_wait_seconds"), "median"),
        Curve(quantile(0.95, "homing_queue_wait_seconds"), "95 %"),
    ),
    curves(
        "Errors by source",
        "reqps",
        "downstream: caused by the client. upstream: by a backend. internal: by the gateway.",
        Curve(rate("homing_errors_total", "source, code"), "{{source}} {{code}}"),
    ),
    curves(
        "Retries on another backend",
        "reqps",
        "Failed attempts that another backend was asked to answer.",
        Curve(rate("homing_retries_total", "code"), "{{code}}"),
    ),
    curves(
        "Client disconnects",
        "reqps",
        "Requests whose client left before the answer was complete, by API.",
        Curve(rate("homing_client_disconnects_total", "api"), "{{api}}"),
    ),
    curves(
        "Generated tokens",
        "none",
        "Tokens per second by backend.",
        Curve(rate("homing_completion_tokens_total", "backend"), "{{backend}}"),
        is_stacked=True,
    ),
)


def _dashboard(name: str, title: str, text: str, panels: Panels) -> builders.Dashboard:
    source = builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    board = builders.Dashboard(title).uid(f"homing-{name}").description(text).tags(["homing"])
    board = board.timezone("browser").refresh("30s").time("now-3h", "now").with_variable(source)
    for panel in panels:
        board = board.with_panel(panel)
    return board


def build() -> dict[str, str]:
    """Return the content of each dashboard by file name."""
    boards = {
        "fleet": ("Homing: fleet", "State, load and errors of backends and gateways.", FLEET),
        "sessions": ("Homing: sessions and cache", "Whether turns find their history.", SESSIONS),
        "requests": ("Homing: requests and latency", "Requests, latency and gateway overhead.", REQUESTS),
    }
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {
        f"{name}.json": encoder.encode(_dashboard(name, *parts).build()) + "\n"
        for name, parts in boards.items()
    }


if __name__ == "__main__":
    for file_name, content in build().items():
        (FOLDER / file_name).write_text(content)
