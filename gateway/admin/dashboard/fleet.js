// The fleet: one row per backend, with buttons to cordon, drain and undrain it.

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
  sleeping: "warn",
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
  const found = all.filter((backend) =>
    `${backend.id} ${backend.url} ${backend.state} ${backend.engine}`.toLowerCase().includes(wanted),
  );
  const most = Math.max(1, ...found.map((backend) => backend.in_flight));
  const columns = [
    { name: "Backend", kind: "title", cell: (backend) => nameOf(backend) },
    { name: "State", cell: (backend) => stateOf(backend) },
    {
      name: "Load",
      kind: "number",
      cell: (backend) => withBar(backend.in_flight, backend.in_flight / most, `${backend.in_flight} in flight`),
    },
    { name: "Wait", kind: "number", cell: (backend) => seconds(backend.routing?.wait_s) },
    { name: "Sessions", kind: "number", cell: (backend) => count(backend.sessions) },
    {
      name: "Hit rate",
      kind: "number",
      cell: (backend) =>
        withBar(share(backend.hit_rate), backend.hit_rate ?? 0, `hit rate ${share(backend.hit_rate)}`, "is-cached"),
    },
    { name: "KV in use", kind: "number", cell: (backend) => kvOf(backend) },
    { name: "Weight", kind: "number", cell: (backend) => backend.weight },
    { name: "", kind: "actions", cell: (backend) => actionsOf(backend) },
  ];
  const rest =
    found.length > MAX_ROWS
      ? make("p", { class: "note", text: `Showing ${MAX_ROWS} of ${found.length}. Filter to see others.` })
      : null;
  replace(
    byId("fleet-body"),
    table(columns, found.slice(0, MAX_ROWS), all.length ? "No backend matches the filter" : "No backends yet"),
    rest,
  );
});

function nameOf(backend) {
  const more = `${backend.engine} · ${backend.url}${backend.models?.length ? ` · ${backend.models.join(", ")}` : ""}`;
  return make("span", {}, named(backend.id), make("br"), make("span", { class: "quiet mono", text: more }));
}

function stateOf(backend) {
  const pill = make("span", { class: `pill ${STATE_CLASS[backend.state] ?? ""}`, text: backend.state });
  if (!backend.drain) return pill;
  const left = backend.drain.is_drained
    ? "empty"
    : `${many(backend.drain.sessions, "session")}, ${many(backend.drain.in_flight, "request")} left`;
  return make("span", {}, pill, make("br"), make("span", { class: "quiet", text: left }));
}

function kvOf(backend) {
  return backend.kv_usage === null
    ? "–"
    : withBar(
        share(backend.kv_usage),
        backend.kv_usage,
        `KV cache ${share(backend.kv_usage)} in use`,
        backend.kv_usage > 0.9 ? "is-high" : "",
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

function actionsOf(backend) {
  const isHeld = backend.state === "draining" || backend.state === "cordoned" || backend.drain !== null;
  const button = (text, focus, click) =>
    make("button", {
      type: "button",
      text,
      "data-focus": `${focus}:${backend.id}`,
      "aria-label": `${text} ${backend.id}`,
      on: { click },
    });
  const buttons = isHeld
    ? [button("Undrain", "drain", () => order(backend, "undrain", `${backend.id} takes sessions again`))]
    : [button("Cordon", "cordon", () => askCordon(backend)), button("Drain", "drain", () => askDrain(backend))];
  return make("span", {}, ...buttons);
}

async function askDrain(backend) {
  const lines = [
    make("p", {
      text: `${backend.id} stops taking new sessions. ${many(backend.sessions, "bound session")} will move to other backends at the next turn, which recomputes the history. ${many(backend.in_flight, "running request")} will finish.`,
    }),
    make("p", { class: "quiet", text: await costOf(backend.id) }),
  ];
  if (await confirm(`Drain ${backend.id}?`, "Drain", ...lines))
    await order(backend, "drain", `${backend.id} is draining`);
}

async function askCordon(backend) {
  const line = make("p", { text: `${backend.id} stops taking new sessions. Bound sessions stay.` });
  if (await confirm(`Cordon ${backend.id}?`, "Cordon", line)) await order(backend, "cordon", `${backend.id} is cordoned`);
}

/** The context tokens that draining this backend would recompute: ask what-if about its removal. */
async function costOf(id) {
  try {
    const judged = await post("what-if", { remove: [id] });
    return `About ${count(judged.tokens_moved)} tokens of context would be recomputed (${share(judged.tokens_moved_share)} of all).`;
  } catch {
    return "";
  }
}

async function order(backend, verb, words) {
  try {
    const answer = await post(`backends/${encodeURIComponent(backend.id)}/${verb}`);
    const isShared = answer.orders.every((one) => one.is_shared);
    toast(isShared ? words : `${words} at this gateway; the others are told as soon as Redis answers`);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    toast(error.message, { isBad: true });
  }
  refresh();
}
