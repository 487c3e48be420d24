// What is seen at a glance: numbers, curves by turn, traffic, ring and balance, moves, prompt groups.

import { Chart } from "./charts.js";
import { colourOf, named } from "./colours.js";
import { bar, byId, draw, make, replace, table, whenChanged } from "./dom.js";
import { ago, count, many, rate, seconds, share, short, words } from "./format.js";

const MAX_SAMPLES = 300; // ten minutes at two seconds
const sum = (counts) => Object.values(counts).reduce((total, one) => total + one, 0);

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
      { label: "mostly computed anew", colour: "--c1", class: "cold" },
      { label: "engine does not say", colour: "--quiet", class: "unknown" },
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
    summary.status.backends.map((one) => ({ id: one.id, sessions: one.sessions, in_flight: one.in_flight })),
  );
  showCauses(summary.status.moves, summary.status.affinity, summary.recomputed_tokens);
  showMoves(summary.recent_moves.slice(-5).reverse(), Math.round(summary.at_wall_s / 5) * 5);
  showGroups(summary.groups.slice(0, 10));
}

/** Requests per second since the last look. */
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
  const ready = backends.filter((one) => one.state === "ready").length;
  const hitRate = summary.prompt_tokens ? summary.cached_tokens / summary.prompt_tokens : null;
  const tiles = [
    ["Requests per second", rate(perSecond), `${count(sum(summary.requests))} in all`],
    ["In flight", count(summary.in_flight), `${many(sum(summary.errors), "error")} in all`],
    ["Hit rate", share(hitRate), "of prompt tokens"],
    ["Tokens saved", count(summary.cached_tokens), `of ${count(summary.prompt_tokens)}`],
    ["Sessions", count(store.sessions), `${store.kind} store${store.is_degraded ? ", degraded" : ""}`],
    ["Backends ready", `${ready} / ${backends.length}`, `${many(sum(summary.status.moves), "move")} in all`],
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
  const x = points.map((one) => one.turn);
  const last = points.at(-1);
  hits.show(
    [x, points.map((one) => one.hit_rate)],
    `Hit rate by turn: ${points.map((one) => `turn ${one.turn} ${share(one.hit_rate)}`).join(", ")}`,
  );
  firstTokens.show(
    [
      x,
      points.map((one) => one.ttft_hit_s),
      points.map((one) => one.ttft_cold_s),
      points.map((one) => one.ttft_unknown_s),
    ],
    `First token at turn ${last.turn}: ${seconds(last.ttft_hit_s)} with the history in cache, ${seconds(last.ttft_cold_s)} without`,
  );
});

function showTraffic(summary) {
  if (samples[0].length > 1)
    traffic.show(samples, `${rate(samples[1].at(-1))} requests per second, ${summary.in_flight} in flight`);
}

const showBalance = whenChanged((ring, backends) => {
  const loads = new Map(backends.map((one) => [one.id, one]));
  const sessions = Math.max(
    1,
    backends.reduce((total, one) => total + one.sessions, 0),
  );
  const inFlight = Math.max(
    1,
    backends.reduce((total, one) => total + one.in_flight, 0),
  );
  const rows = ring.map((one) =>
    make(
      "div",
      { class: "trio" },
      named(one.backend),
      make("span", { text: share(one.share) }),
      make("span", { text: share((loads.get(one.backend)?.sessions ?? 0) / sessions) }),
      make("span", { text: share((loads.get(one.backend)?.in_flight ?? 0) / inFlight) }),
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
  const label = `The ring: ${shares.map((one) => `${one.backend} ${share(one.share)}`).join(", ")}`;
  const svg = draw("svg", { class: "ring", viewBox: "0 0 160 160", role: "img", "aria-label": label });
  const around = 2 * Math.PI * 62;
  let start = 0;
  for (const one of shares) {
    const length = Math.max(0, one.share * around - (shares.length > 1 ? 1.5 : 0));
    svg.append(
      draw("circle", {
        class: `arc ${colourOf(one.backend)}`,
        cx: 80,
        cy: 80,
        r: 62,
        "stroke-dasharray": `${length} ${around - length}`,
        "stroke-dashoffset": -start,
        transform: "rotate(-90 80 80)",
      }),
    );
    start += one.share * around;
  }
  svg.append(
    draw("text", { x: 80, y: 84, text: shares.length }),
    draw("text", { class: "small", x: 80, y: 103, text: shares.length === 1 ? "backend" : "backends" }),
  );
  return svg;
}

const showCauses = whenChanged((moves, affinity, recomputed) => {
  const outcomes = Object.entries(affinity).sort((one, other) => other[1] - one[1]);
  const told = outcomes.map(([name, number]) => `${count(number)} ${words(name)}`).join(" · ");
  const isAny = Object.keys(recomputed).length > 0;
  replace(
    byId("causes-body"),
    make("p", { class: "note", text: told || "No requests yet" }),
    barsOf(moves, "move") ?? make("p", { class: "empty", text: "No session has changed its home" }),
    isAny ? make("h3", { text: "Tokens computed again, by cause" }) : null,
    barsOf(recomputed, "token"),
  );
});

/** One bar per cause, the most frequent first; nothing where there is none. */
function barsOf(counts, noun) {
  const causes = Object.entries(counts).sort((one, other) => other[1] - one[1]);
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
  const lines = moves.map((one, place) =>
    make(
      "li",
      {},
      make("time", { text: ago(one.at_wall_s, nowS) }),
      make("button", {
        type: "button",
        class: "link mono",
        text: short(one.session),
        "data-focus": `move:${place}`,
        on: { click: () => openSession(one.session) },
      }),
      make("span", { text: `${one.before ?? "?"} → ${one.after}` }),
      make("span", { class: "quiet", text: words(one.reason) }),
    ),
  );
  return replace(byId("moves-body"), make("ol", { class: "list" }, ...lines));
});

const showGroups = whenChanged((groups) => {
  const columns = [
    {
      name: "Group",
      kind: "title",
      cell: (one) =>
        make(
          "span",
          {},
          make("span", { class: "mono", text: short(one.key) }),
          make("br"),
          make("span", { class: "quiet", text: one.model ?? "" }),
        ),
    },
    { name: "Lately", kind: "number", cell: (one) => count(one.recent_requests) },
    { name: "Hit rate", kind: "number", cell: (one) => share(one.hit_rate) },
    { name: "Tokens", kind: "number", cell: (one) => count(one.prefix_tokens) },
    {
      name: "Held by",
      cell: (one) =>
        make(
          "span",
          { class: "name" },
          ...one.holders.slice(0, 8).map((holder) =>
            make("span", {
              class: `dot ${colourOf(holder.backend)}`,
              title: `${holder.backend}: ${count(holder.tokens)} tokens`,
            }),
          ),
          make("span", { text: one.holders.length }),
        ),
    },
  ];
  replace(byId("groups-body"), table(columns, groups, "No system prompt has been seen yet"));
});
