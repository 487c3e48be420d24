"""Writes the dashboards beside it: `python deploy/grafana/build.py`.

The JSON files are what Grafana reads and are kept in the repository; this is what they are made from, so that
every panel has a plain title, a unit and one sentence on how to read it, and all three look alike. A test
builds them again, compares, and looks every metric up in gateway/observability/METRICS.md.
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
    """One query and the name of its lines."""

    expr: str
    legend: str


def curves(title: str, unit: str, text: str, *queries: Curve, is_stacked: bool = False) -> timeseries.Panel:
    """A panel of lines over time; stacked where the parts make up a whole."""
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

# Is the fleet well, and is it evenly used?
FLEET = (
    number(
        "Backends that serve",
        "none",
        "Ready, degraded or cordoned ones.",
        Curve("homing:backends_ready:count", ""),
    ),
    number(
        "Requests per second", "reqps", "All gateways together.", Curve(rate("homing_requests_total"), "")
    ),
    number("Requests under way", "none", "Streams included.", Curve("sum(homing_requests_in_flight)", "")),
    number(
        "Failed requests",
        "percentunit",
        "Share of 5xx in five minutes; mistakes of clients left out.",
        Curve("homing:errors:ratio_rate5m", ""),
    ),
    number(
        "Prompt tokens from cache",
        "percentunit",
        "Share of prompt tokens that engines did not compute.",
        Curve("homing:hit_rate:ratio_rate5m", ""),
    ),
    number(
        "Sessions",
        "none",
        "Bound to a backend, as one gateway knows them.",
        Curve("max(homing_sessions)", ""),
    ),
    curves(
        "Backends by state",
        "none",
        "Each backend is in one state; a gateway that sees it differently adds to both.",
        Curve("sum by (state) (max by (backend, state) (homing_backend_state))", "{{state}}"),
        is_stacked=True,
    ),
    curves(
        "Requests under way by backend",
        "none",
        "An even fleet has lines close together; sessions are not equal, so not on top of each other.",
        Curve("sum by (backend) (homing_backend_in_flight)", "{{backend}}"),
    ),
    curves(
        "Failed attempts by backend",
        "reqps",
        "Each may have been answered by another backend.",
        Curve(rate("homing_upstream_errors_total", "backend, code"), "{{backend}} {{code}}"),
    ),
    curves(
        "Restarts seen",
        "none",
        "Lives of each backend's cache begun in the last hour; its sessions were lost.",
        Curve("max by (backend) (changes(homing_backend_epoch[1h]))", "{{backend}}"),
    ),
    curves(
        "Requests that wait",
        "none",
        "For a place on the fleet or on their home.",
        Curve("sum(homing_queue_depth)", "waiting"),
    ),
    curves(
        "Refused requests by cause",
        "reqps",
        "Answered with 429 or 503 and Retry-After.",
        Curve(rate("homing_admission_rejections_total", "cause"), "{{cause}}"),
    ),
    curves(
        "Lateness of the gateways",
        "s",
        "Worst delay of the event loop in half a minute: lack of CPU, or something that blocks.",
        Curve("max by (instance) (homing_event_loop_lag_seconds)", "{{instance}}"),
    ),
    curves(
        "CPU of the gateways",
        "none",
        "Cores in use, all processes of an instance.",
        Curve('rate(process_cpu_seconds_total{job="homing"}[$__rate_interval])', "{{instance}}"),
    ),
    curves(
        "Memory of the gateways",
        "bytes",
        "Resident, all processes of an instance.",
        Curve('process_resident_memory_bytes{job="homing"}', "{{instance}}"),
    ),
    curves(
        "Time spent waiting for the session store",
        "s",
        "Mean of the round trips that a request waited for.",
        Curve(f"{rate(STORE_TIME)} / {rate(STORE_CALLS)}", "mean"),
    ),
    curves(
        "Trouble with the session store",
        "ops",
        "Failed calls by kind; requests go on without it.",
        Curve(rate("homing_session_store_errors_total", "kind"), "{{kind}}"),
        Curve("max(homing_session_store_degraded)", "degraded"),
    ),
    curves(
        "Configuration in force",
        "none",
        "Grows with each reload; falls to 1 at a restart.",
        Curve("max by (instance) (homing_config_generation)", "{{instance}}"),
    ),
    curves(
        "Log lines lost",
        "ops",
        "Above 0, what reads the gateways' standard error is too slow or has gone.",
        Curve(rate("homing_log_lines_lost_total", "instance"), "{{instance}}"),
    ),
)


# Do turns find their history?
SESSIONS = (
    curves(
        "Prompt tokens from cache",
        "percentunit",
        "Measured by engines, and what routing had expected to be there.",
        Curve("homing:hit_rate:ratio_rate5m", "found"),
        Curve(
            "sum(rate(homing_expected_cached_tokens_total[5m])) / sum(rate(homing_prompt_tokens_total[5m]))",
            "expected",
        ),
    ),
    curves(
        "Prompt tokens from cache by turn",
        "percentunit",
        "First turns can only share a system prompt; from the second on it should be high.",
        Curve("homing_turn:hit_rate:ratio_rate5m", "turn {{turn}}"),
    ),
    curves(
        "Prompt tokens from cache by backend",
        "percentunit",
        "One far below the others may have a cache too small for its sessions.",
        Curve("homing_backend:hit_rate:ratio_rate5m", "{{backend}}"),
    ),
    curves(
        "Prompt tokens",
        "none",
        "Per second, computed or found in a cache.",
        Curve(f"{rate('homing_prompt_tokens_total')} - {rate('homing_cached_tokens_total')}", "computed"),
        Curve(rate("homing_cached_tokens_total"), "from cache"),
        is_stacked=True,
    ),
    curves(
        "Tokens computed a second time, by cause",
        "none",
        "Per second. evicted: home had let them go; the rest: the session was answered elsewhere.",
        Curve(rate("homing_recomputed_tokens_total", "cause"), "{{cause}}"),
        is_stacked=True,
    ),
    curves(
        "Sessions that moved, by reason",
        "ops",
        "Each move computes a history again unless the new home has it.",
        Curve(rate("homing_session_moves_total", "reason"), "{{reason}}"),
        is_stacked=True,
    ),
    curves(
        "What became of the affinity",
        "reqps",
        "hit: served at home. unpinned: no session to follow.",
        Curve(rate("homing_affinity_total", "affinity"), "{{affinity}}"),
        is_stacked=True,
    ),
    curves(
        "Where keys come from",
        "reqps",
        "header and body are certain; fingerprint is a guess from the first turn.",
        Curve(rate("homing_affinity_total", "key_source"), "{{key_source}}"),
        is_stacked=True,
    ),
    curves(
        "Keys that were not believed",
        "reqps",
        "Shared by too much of the traffic, or never seen again.",
        Curve(rate("homing_distrusted_keys_total", "kind"), "{{kind}}"),
    ),
    curves(
        "Answers that say nothing of tokens",
        "reqps",
        "They are missing in all shares above.",
        Curve(rate("homing_usage_unknown_total", "what"), "{{what}}"),
    ),
    curves(
        "Lookups of sessions",
        "ops",
        "local: answered by the gateway's own copy.",
        Curve(rate("homing_session_store_lookups_total", "source"), "{{source}}"),
        is_stacked=True,
    ),
    curves(
        "Sessions forgotten for lack of room",
        "ops",
        "Raise the cap of the session table if it is not zero.",
        Curve(rate("homing_session_store_evictions_total"), "evicted"),
    ),
)


TTFT, OVERHEAD = "homing_time_to_first_token_seconds", "homing_gateway_overhead_seconds"

# What do clients feel?
REQUESTS = (
    curves(
        "Requests by API",
        "reqps",
        "All gateways together.",
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
        "Time to first token",
        "s",
        "Streams, from the request's arrival at the gateway.",
        Curve(quantile(0.5, TTFT), "median"),
        Curve(quantile(0.95, TTFT), "95 %"),
        Curve(quantile(0.99, TTFT), "99 %"),
    ),
    curves(
        "Time to first token by turn",
        "s",
        "Median. Later turns are longer: flat lines are the work of the cache.",
        Curve(quantile(0.5, TTFT, "turn"), "turn {{turn}}"),
    ),
    curves(
        "Time between tokens",
        "s",
        "Mean of each answer, over answers.",
        Curve(quantile(0.5, "homing_inter_token_seconds"), "median"),
        Curve(quantile(0.95, "homing_inter_token_seconds"), "95 %"),
    ),
    curves(
        "Whole requests by API",
        "s",
        "95 % are shorter.",
        Curve(quantile(0.95, "homing_request_duration_seconds", "api"), "{{api}}"),
    ),
    curves(
        "The gateway's own time",
        "s",
        "From arrival to the first byte sent to a backend, waits for a place left out.",
        Curve(quantile(0.5, OVERHEAD), "median"),
        Curve(quantile(0.99, OVERHEAD), "99 %"),
    ),
    curves(
        "Time in the queue",
        "s",
        "Of the requests that had to wait.",
        Curve(quantile(0.5, "homing_queue_wait_seconds"), "median"),
        Curve(quantile(0.95, "homing_queue_wait_seconds"), "95 %"),
    ),
    curves(
        "Errors by source",
        "reqps",
        "downstream: the client's. upstream: a backend's. internal: the gateway's.",
        Curve(rate("homing_errors_total", "source, code"), "{{source}} {{code}}"),
    ),
    curves(
        "Attempts moved to another backend",
        "reqps",
        "Clients did not notice these.",
        Curve(rate("homing_retries_total", "code"), "{{code}}"),
    ),
    curves(
        "Clients that left early",
        "reqps",
        "By API.",
        Curve(rate("homing_client_disconnects_total", "api"), "{{api}}"),
    ),
    curves(
        "Tokens generated",
        "none",
        "Per second and backend.",
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
    """File name → content of each dashboard."""
    boards = {
        "fleet": ("Homing: fleet", "States, load and trouble of backends and gateways.", FLEET),
        "sessions": ("Homing: sessions and cache", "Whether turns find their history.", SESSIONS),
        "requests": ("Homing: requests and latency", "What clients feel, and the gateway's share.", REQUESTS),
    }
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {
        f"{name}.json": encoder.encode(_dashboard(name, *parts).build()) + "\n"
        for name, parts in boards.items()
    }


if __name__ == "__main__":
    for file_name, content in build().items():
        (FOLDER / file_name).write_text(content)
