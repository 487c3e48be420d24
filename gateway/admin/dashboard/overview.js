// The overview: numbers, curves by turn, traffic, ring and balance, moves, prompt groups.

import { Chart } from "./charts.js";
import { colourOf, named } from "./colours.js";
import { bar, byId, draw, make, replace, table, whenChanged } from "./dom.js";
import { ago, count, many, rate, seconds, share, short, words } from "./format.js";

const MAX_SAMPLES = 300; // ten minutes at two seconds
const sum = (counts) => Object.values(counts).reduce((total, number) => total + number, 0);

let hits;
let firstTokens;
let traffic;
let before = null;
let openSession = () => {};
const samples = [[], [], []];

export function startOverview(onSession) {
  openSession = onSession;
  hits = new Chart("hits-chart", {
    lines: [{ label: "cached share of prompt tokens", colour: "--good", class: "good" }],
    format: share,
    step: 0.01,
    max: 1.02,
  });
  firstTokens = new Chart("ttft-chart", {
    lines: [
      { label: "prompt mostly in cache", colour: "--good", class: "good" },
      { label: "prompt mostly recomputed", colour: "--c1", class: "cold" },
      { label: "engine does not report it", colour: "--quiet", class: "unknown" },
    ],
    format: seconds,
    step: 0.001,
  });
  traffic = new Chart("traffic-chart", {
    lines: [
      { label: "requests per second", colour: "--cool", class: "plain" },
      { label: "in flight", colour: "--c1", class: "cold" },
    ],
    format: rate,
    step: 0.1,
    isTime: true,
  });
}

export function showOverview(summary) {
  const perSecond = takeSample(summary);
  showTiles(summary, perSecond);
  showTurns(summary.by_turn);
  showTraffic(summary);
  showBalance(
    summary.ring,
    summary.status.backends.map((backend) => ({ id: backend.id, sessions: backend.sessions, in_flight: backend.in_flight })),
  );
  showCauses(summary.status.moves, summary.status.affinity, summary.recomputed_tokens);
  showMoves(summary.recent_moves.slice(-5).reverse(), Math.round(summary.at_wall_s / 5) * 5);
  showGroups(summary.groups.slice(0, 10));
}

/** Requests per second since the last poll. */
function takeSample(summary) {
  const now = {
    at: summary.at_wall_s,
    requests: sum(summary.requests),
    prompt: summary.prompt_tokens,
    cached: summary.cached_tokens,
  };
  const last = before;
  before = now;
  if (!last || now.at <= last.at || now.requests < last.requests) return null;
  const perSecond = (now.requests - last.requests) / (now.at - last.at);
  samples[0].push(now.at);
  samples[1].push(perSecond);
  samples[2].push(summary.in_flight);
  for (const column of samples) if (column.length > MAX_SAMPLES) column.shift();
  return perSecond;
}

const showTiles = whenChanged((summary, perSecond) => {
  const { backends, session_store: store } = summary.status;
  const ready = backends.filter((backend) => backend.state === "ready").length;
  const hitRate = summary.prompt_tokens ? summary.cached_tokens / summary.prompt_tokens : null;
  const tiles = [
    ["Requests per second", rate(perSecond), `${count(sum(summary.requests))} in total`],
    ["In flight", count(summary.in_flight), `${many(sum(summary.errors), "error")} in total`],
    ["Hit rate", share(hitRate), "of prompt tokens"],
    ["Tokens saved", count(summary.cached_tokens), `of ${count(summary.prompt_tokens)}`],
    ["Sessions", count(store.sessions), `${store.kind} store${store.is_degraded ? ", degraded" : ""}`],
    ["Backends ready", `${ready} / ${backends.length}`, `${many(sum(summary.status.moves), "move")} in total`],
  ];
  replace(
    byId("glance"),
    ...tiles.map(([name, value, more]) =>
      make(
        "dl",
        { class: "tile" },
        make("dt", { text: name }),
        make("dd", { text: value }),
        make("dd", { text: more }),
      ),
    ),
  );
});

const showTurns = whenChanged((points) => {
  if (!points.length) return;
  const x = points.map((point) => point.turn);
  const last = points.at(-1);
  hits.show(
    [x, points.map((point) => point.hit_rate)],
    `Hit rate by turn: ${points.map((point) => `turn ${point.turn} ${share(point.hit_rate)}`).join(", ")}`,
  );
  firstTokens.show(
    [
      x,
      points.map((point) => point.ttft_hit_s),
      points.map((point) => point.ttft_cold_s),
      points.map((point) => point.ttft_unknown_s),
    ],
    `Time to first token at turn ${last.turn}: ${seconds(last.ttft_hit_s)} with the history in cache, ${seconds(last.ttft_cold_s)} without`,
  );
});

function showTraffic(summary) {
  if (samples[0].length > 1)
    traffic.show(samples, `${rate(samples[1].at(-1))} requests per second, ${summary.in_flight} in flight`);
}

const showBalance = whenChanged((ring, backends) => {
  const loads = new Map(backends.map((backend) => [backend.id, backend]));
  const sessions = Math.max(
    1,
    backends.reduce((total, backend) => total + backend.sessions, 0),
  );
  const inFlight = Math.max(
    1,
    backends.reduce((total, backend) => total + backend.in_flight, 0),
  );
  const rows = ring.map((arc) =>
    make(
      "div",
      { class: "trio" },
      named(arc.backend),
      make("span", { text: share(arc.share) }),
      make("span", { text: share((loads.get(arc.backend)?.sessions ?? 0) / sessions) }),
      make("span", { text: share((loads.get(arc.backend)?.in_flight ?? 0) / inFlight) }),
    ),
  );
  const heads = ["", "ring", "sessions", "load"].map((text) => make("span", { text }));
  replace(
    byId("balance-body"),
    ringOf(ring),
    make("div", { class: "shares" }, make("div", { class: "trio headline" }, ...heads), ...rows),
  );
});

/** A ring whose arcs are the backends' shares. */
function ringOf(shares) {
  const label = `The ring: ${shares.map((arc) => `${arc.backend} ${share(arc.share)}`).join(", ")}`;
  const svg = draw("svg", { class: "ring", viewBox: "0 0 160 160", role: "img", "aria-label": label });
  const around = 2 * Math.PI * 62;
  let start = 0;
  for (const arc of shares) {
    const length = Math.max(0, arc.share * around - (shares.length > 1 ? 1.5 : 0));
    svg.append(
      draw("circle", {
        class: `arc ${colourOf(arc.backend)}`,
        cx: 80,
        cy: 80,
        r: 62,
        "stroke-dasharray": `${length} ${around - length}`,
        "stroke-dashoffset": -start,
        transform: "rotate(-90 80 80)",
      }),
    );
    start += arc.share * around;
  }
  svg.append(
    draw("text", { x: 80, y: 84, text: shares.length }),
    draw("text", { class: "small", x: 80, y: 103, text: shares.length === 1 ? "backend" : "backends" }),
  );
  return svg;
}

const showCauses = whenChanged((moves, affinity, recomputed) => {
  const outcomes = Object.entries(affinity).sort((first, other) => other[1] - first[1]);
  const told = outcomes.map(([name, number]) => `${count(number)} ${words(name)}`).join(" · ");
  const isAny = Object.keys(recomputed).length > 0;
  replace(
    byId("causes-body"),
    make("p", { class: "note", text: told || "No requests yet" }),
    barsOf(moves, "move") ?? make("p", { class: "empty", text: "No session has moved" }),
    isAny ? make("h3", { text: "Recomputed tokens by cause" }) : null,
    barsOf(recomputed, "token"),
  );
});

/** One bar per cause, most frequent first; null if there are none. */
function barsOf(counts, noun) {
  const causes = Object.entries(counts).sort((first, other) => other[1] - first[1]);
  if (!causes.length) return null;
  const most = Math.max(1, causes[0][1]);
  const lines = causes.flatMap(([cause, number]) => [
    make("span", { text: words(cause) }),
    bar([{ share: number / most }], many(number, noun)),
    make("span", { text: count(number) }),
  ]);
  return make("div", { class: "causes" }, ...lines);
}

const showMoves = whenChanged((moves, nowS) => {
  if (!moves.length) return replace(byId("moves-body"), make("p", { class: "empty", text: "None" }));
  const lines = moves.map((move, place) =>
    make(
      "li",
      {},
      make("time", { text: ago(move.at_wall_s, nowS) }),
      make("button", {
        type: "button",
        class: "link mono",
        text: short(move.session),
        "data-focus": `move:${place}`,
        on: { click: () => openSession(move.session) },
      }),
      make("span", { text: `${move.before ?? "?"} → ${move.after}` }),
      make("span", { class: "quiet", text: words(move.reason) }),
    ),
  );
  return replace(byId("moves-body"), make("ol", { class: "list" }, ...lines));
});

const showGroups = whenChanged((groups) => {
  const columns = [
    {
      name: "Group",
      kind: "title",
      cell: (group) =>
        make(
          "span",
          {},
          make("span", { class: "mono", text: short(group.key) }),
          make("br"),
          make("span", { class: "quiet", text: group.model ?? "" }),
        ),
    },
    { name: "Recent requests", kind: "number", cell: (group) => count(group.recent_requests) },
    { name: "Hit rate", kind: "number", cell: (group) => share(group.hit_rate) },
    { name: "Tokens", kind: "number", cell: (group) => count(group.prefix_tokens) },
    {
      name: "Held by",
      cell: (group) =>
        make(
          "span",
          { class: "name" },
          ...group.holders.slice(0, 8).map((holder) =>
            make("span", {
              class: `dot ${colourOf(holder.backend)}`,
              title: `${holder.backend}: ${count(holder.tokens)} tokens`,
            }),
          ),
          make("span", { text: group.holders.length }),
        ),
    },
  ];
  replace(byId("groups-body"), table(columns, groups, "No system prompts seen yet"));
});
