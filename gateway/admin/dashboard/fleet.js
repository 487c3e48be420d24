// The fleet: a line per backend, and the orders that an operator may give.

import { ApiError, post } from "./api.js";
import { named } from "./colours.js";
import { confirm, toast } from "./dialogs.js";
import { bar, byId, make, replace, table, whenChanged } from "./dom.js";
import { count, many, seconds, share } from "./format.js";

const MAX_ROWS = 100;
const FILTER_FROM = 9;
const STATE_CLASS = {
  ready: "good",
  joining: "warn",
  degraded: "warn",
  draining: "warn",
  cordoned: "warn",
  down: "bad",
};

let refresh = () => {};
let backends = [];

export function startFleet(onChange) {
  refresh = onChange;
  byId("fleet-filter").addEventListener("input", () => render(backends, byId("fleet-filter").value));
}

export function showFleet(summary) {
  backends = summary.status.backends;
  byId("fleet-filter").hidden = backends.length < FILTER_FROM;
  render(backends, byId("fleet-filter").value);
}

const render = whenChanged((all, filter) => {
  const wanted = filter.trim().toLowerCase();
  const found = all.filter((one) =>
    `${one.id} ${one.url} ${one.state} ${one.engine}`.toLowerCase().includes(wanted),
  );
  const most = Math.max(1, ...found.map((one) => one.in_flight));
  const columns = [
    { name: "Backend", kind: "title", cell: (one) => nameOf(one) },
    { name: "State", cell: (one) => stateOf(one) },
    {
      name: "Load",
      kind: "number",
      cell: (one) => withBar(one.in_flight, one.in_flight / most, `${one.in_flight} in flight`),
    },
    { name: "Wait", kind: "number", cell: (one) => seconds(one.routing?.wait_s) },
    { name: "Sessions", kind: "number", cell: (one) => count(one.sessions) },
    {
      name: "Hit rate",
      kind: "number",
      cell: (one) =>
        withBar(share(one.hit_rate), one.hit_rate ?? 0, `hit rate ${share(one.hit_rate)}`, "is-cached"),
    },
    { name: "KV in use", kind: "number", cell: (one) => kvOf(one) },
    { name: "Weight", kind: "number", cell: (one) => one.weight },
    { name: "", kind: "actions", cell: (one) => actionsOf(one) },
  ];
  const rest =
    found.length > MAX_ROWS
      ? make("p", { class: "note", text: `${MAX_ROWS} of ${found.length} shown: filter for others` })
      : null;
  replace(
    byId("fleet-body"),
    table(columns, found.slice(0, MAX_ROWS), all.length ? "No backend matches" : "No backend yet"),
    rest,
  );
});

function nameOf(one) {
  const more = `${one.engine} · ${one.url}${one.models?.length ? ` · ${one.models.join(", ")}` : ""}`;
  return make("span", {}, named(one.id), make("br"), make("span", { class: "quiet mono", text: more }));
}

function stateOf(one) {
  const pill = make("span", { class: `pill ${STATE_CLASS[one.state] ?? ""}`, text: one.state });
  if (!one.drain) return pill;
  const left = one.drain.is_drained
    ? "empty"
    : `${many(one.drain.sessions, "session")}, ${many(one.drain.in_flight, "request")} left`;
  return make("span", {}, pill, make("br"), make("span", { class: "quiet", text: left }));
}

function kvOf(one) {
  return one.kv_usage === null
    ? "–"
    : withBar(
        share(one.kv_usage),
        one.kv_usage,
        `KV cache ${share(one.kv_usage)} in use`,
        one.kv_usage > 0.9 ? "is-high" : "",
      );
}

function withBar(text, part, label, kind = "") {
  return make(
    "span",
    { class: "with-bar" },
    make("span", { text }),
    bar([{ share: part, class: kind }], label),
  );
}

function actionsOf(one) {
  const isHeld = one.state === "draining" || one.state === "cordoned" || one.drain !== null;
  const button = (text, focus, click) =>
    make("button", {
      type: "button",
      text,
      "data-focus": `${focus}:${one.id}`,
      "aria-label": `${text} ${one.id}`,
      on: { click },
    });
  const buttons = isHeld
    ? [button("Undrain", "drain", () => order(one, "undrain", `${one.id} takes sessions again`))]
    : [button("Cordon", "cordon", () => askCordon(one)), button("Drain", "drain", () => askDrain(one))];
  return make("span", {}, ...buttons);
}

async function askDrain(one) {
  const lines = [
    make("p", {
      text: `${one.id} takes no new sessions. What is bound to it (${many(one.sessions, "session")}) moves at its next turn and is computed again elsewhere; what runs (${many(one.in_flight, "request")}) finishes.`,
    }),
    make("p", { class: "quiet", text: await costOf(one.id) }),
  ];
  if (await confirm(`Drain ${one.id}?`, "Drain", ...lines))
    await order(one, "drain", `${one.id} is draining`);
}

async function askCordon(one) {
  const line = make("p", { text: `${one.id} takes no new sessions. Bound ones stay.` });
  if (await confirm(`Cordon ${one.id}?`, "Cordon", line)) await order(one, "cordon", `${one.id} is cordoned`);
}

/** What the sessions of a backend hold, by the what-if of its removal. */
async function costOf(id) {
  try {
    const judged = await post("what-if", { remove: [id] });
    return `About ${count(judged.tokens_moved)} tokens of context would be computed again (${share(judged.tokens_moved_share)} of all).`;
  } catch {
    return "";
  }
}

async function order(one, verb, words) {
  try {
    await post(`backends/${encodeURIComponent(one.id)}/${verb}`);
    toast(words);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    toast(error.message, { isBad: true });
  }
  refresh();
}
