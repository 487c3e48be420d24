// Sessions: find one, show its history, move it or end it.

import { ApiError, get, post, remove } from "./api.js";
import { colourOf, named } from "./colours.js";
import { confirm, toast } from "./dialogs.js";
import { bar, byId, make, replace, table, whenChanged } from "./dom.js";
import { ago, clock, count, seconds, share, short, words } from "./format.js";

const KEY = /^[0-9a-f]{4,32}$/;

let shown = null; // the key of the session on display
let backendIds = [];
let explain = () => {};

export function startSessions(onExplain) {
  explain = onExplain;
  byId("session-search").addEventListener("submit", (event) => {
    event.preventDefault();
    search(byId("session-id").value.trim(), byId("session-model").value.trim());
  });
  showNothing("Search for a session, or choose a recent one.");
}

export function showSessions(summary) {
  backendIds = summary.status.backends.map((backend) => backend.id);
  showRecent(summary.recent_sessions, Math.round(summary.at_wall_s / 5) * 5);
  if (shown) load(shown, { isQuiet: true });
}

/** Show the session with this key. */
export async function openSession(key) {
  await load(key);
  byId("sessions").scrollIntoView();
  byId("sessions").focus({ preventScroll: true });
}

async function search(text, model) {
  if (!text) return;
  try {
    const byName = new URLSearchParams(model ? { session_id: text, model } : { session_id: text });
    let found = (await get(`sessions?${byName}`)).sessions;
    if (!found.length && KEY.test(text))
      found = (await get(`sessions?${new URLSearchParams({ key: text })}`)).sessions;
    if (!found.length)
      return showNothing(`No session “${text}” is bound. It may have expired, or belong to another model.`);
    await load(found[0].key);
  } catch (error) {
    tell(error);
  }
}

async function load(key, { isQuiet = false } = {}) {
  try {
    const session = await get(`sessions/${encodeURIComponent(key)}`);
    shown = key;
    showDetail(session, backendIds);
  } catch (error) {
    if (error.status === 404) showNothing(`Session ${short(key)} is no longer bound.`);
    else if (!isQuiet) tell(error);
  }
}

function showNothing(text) {
  shown = null;
  showDetail(null, [], text);
}

const showDetail = whenChanged((session, backends, text) => {
  if (!session) return replace(byId("session-detail"), make("p", { class: "empty", text }));
  const story = session.story;
  const facts = [
    ["Session", make("span", { class: "mono", text: session.key })],
    ["Home", named(session.backend)],
    ["Turns", count(session.turns)],
    ["Context", `${count(session.context_tokens)} tokens`],
    ["Hit rate", share(story?.hit_rate)],
    ["Key from", story ? words(story.key_source) : "–"],
    ["Model", story?.model ?? "–"],
    ["Epoch", session.epoch],
  ];
  const list = make(
    "dl",
    { class: "facts" },
    ...facts.map(([name, value]) =>
      make(
        "div",
        {},
        make("dt", { text: name }),
        make("dd", {}, value instanceof Node ? value : String(value)),
      ),
    ),
  );
  const others = backends.filter((id) => id !== session.backend);
  const buttons = make(
    "div",
    { class: "buttons" },
    make("button", {
      type: "button",
      text: "Explain next turn",
      "data-focus": "explain",
      on: { click: () => explain(story?.model ?? "") },
    }),
    ...others.slice(0, 6).map((id) =>
      make("button", {
        type: "button",
        text: `Move to ${id}`,
        "data-focus": `to:${id}`,
        on: { click: () => move(session, id) },
      }),
    ),
    make("button", { type: "button", text: "End", "data-focus": "end", on: { click: () => end(session) } }),
  );
  return replace(byId("session-detail"), list, timelineOf(story), buttons);
});

/** Turns and moves in one list, oldest first. */
function timelineOf(story) {
  if (!story)
    return make("p", {
      class: "empty",
      text: "This replica has not served the session recently, so it has no turns to show.",
    });
  const most = Math.max(1, ...story.last_turns.map((turn) => turn.prompt_tokens ?? 0));
  const events = [
    ...story.last_turns.map((turn) => ({ at: turn.at_wall_s, order: 1, node: turnOf(turn, most) })),
    ...story.moves.map((move) => ({ at: move.at_wall_s, order: 0, node: moveOf(move) })),
  ].sort((first, other) => first.at - other.at || first.order - other.order);
  return make("ol", { class: "timeline" }, ...events.map((event) => event.node));
}

function turnOf(turn, most) {
  const prompt = turn.prompt_tokens ?? 0;
  const cached = turn.cached_tokens ?? 0;
  const told = turn.prompt_tokens === null ? "tokens unknown" : `${count(cached)} of ${count(prompt)} cached`;
  const parts = [
    { share: cached / most, class: "is-cached" },
    { share: (prompt - cached) / most, class: "is-own" },
  ];
  const isBad = turn.status >= 400;
  return make(
    "li",
    { class: colourOf(turn.backend) },
    make("time", { text: clock(turn.at_wall_s) }),
    make(
      "span",
      {},
      make("strong", { text: turn.backend }),
      ` ${words(turn.affinity)} `,
      make("span", {
        class: isBad ? "bad" : "quiet",
        text: isBad ? `status ${turn.status}` : words(turn.reason),
      }),
    ),
    make("span", { title: told }, make("span", { class: "quiet", text: told }), bar(parts, told)),
    make("span", { class: "quiet", text: seconds(turn.ttft_s) }),
  );
}

function moveOf(move) {
  return make(
    "li",
    { class: "move" },
    make("time", { text: clock(move.at_wall_s) }),
    make("span", { text: `moved ${move.before ?? "?"} → ${move.after}: ${words(move.reason)}` }),
  );
}

async function move(session, to) {
  const line = make("p", {
    text: `Its next turn will recompute ${count(session.context_tokens)} tokens of context on ${to}.`,
  });
  if (!(await confirm(`Move the session to ${to}?`, "Move", line))) return;
  try {
    await post(`sessions/${session.key}/move`, { backend: to });
    toast(`Session ${short(session.key)} now lives on ${to}`);
  } catch (error) {
    tell(error);
  }
  load(session.key);
}

async function end(session) {
  const line = make("p", { text: "The gateway forgets which backend it lives on. Its next turn is placed like a new session." });
  if (!(await confirm("End the session?", "End", line))) return;
  try {
    await remove(`sessions/${session.key}`);
    toast(`Session ${short(session.key)} ended`);
  } catch (error) {
    tell(error);
  }
  load(session.key);
}

const showRecent = whenChanged((sessions, nowS) => {
  const columns = [
    {
      name: "Session",
      kind: "title",
      cell: (session) =>
        make("button", {
          type: "button",
          class: "link mono",
          text: short(session.key),
          "data-focus": `recent:${session.key}`,
          on: { click: () => load(session.key) },
        }),
    },
    { name: "Home", cell: (session) => named(session.backend) },
    { name: "Turns", kind: "number", cell: (session) => count(session.turns_seen) },
    { name: "Hit rate", kind: "number", cell: (session) => share(session.hit_rate) },
    { name: "Last", kind: "number", cell: (session) => ago(session.last_seen_wall_s, nowS) },
  ];
  replace(byId("recent-body"), table(columns, sessions.slice(0, 12), "No sessions yet"));
});

function tell(error) {
  if (!(error instanceof ApiError)) throw error;
  toast(error.message, { isBad: true });
}
