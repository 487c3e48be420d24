// Sessions: find one, read its story, move or end it.

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
  showNothing("Search for a session, or choose one of those used last.");
}

export function showSessions(summary) {
  backendIds = summary.status.backends.map((one) => one.id);
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
      return showNothing(`No session “${text}” is bound. It may have ended, or belong to another model.`);
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
    if (error.status === 404) showNothing(`Session ${short(key)} has ended.`);
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
  const others = backends.filter((one) => one !== session.backend);
  const buttons = make(
    "div",
    { class: "buttons" },
    make("button", {
      type: "button",
      text: "Explain its next turn",
      "data-focus": "explain",
      on: { click: () => explain(story?.model ?? "") },
    }),
    ...others.slice(0, 6).map((one) =>
      make("button", {
        type: "button",
        text: `Move to ${one}`,
        "data-focus": `to:${one}`,
        on: { click: () => move(session, one) },
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
      text: "This replica has not served it lately, so it knows no turns.",
    });
  const most = Math.max(1, ...story.last_turns.map((one) => one.prompt_tokens ?? 0));
  const events = [
    ...story.last_turns.map((one) => ({ at: one.at_wall_s, order: 1, node: turnOf(one, most) })),
    ...story.moves.map((one) => ({ at: one.at_wall_s, order: 0, node: moveOf(one) })),
  ].sort((one, other) => one.at - other.at || one.order - other.order);
  return make("ol", { class: "timeline" }, ...events.map((one) => one.node));
}

function turnOf(one, most) {
  const prompt = one.prompt_tokens ?? 0;
  const cached = one.cached_tokens ?? 0;
  const told = one.prompt_tokens === null ? "tokens unknown" : `${count(cached)} of ${count(prompt)} cached`;
  const parts = [
    { share: cached / most, class: "is-cached" },
    { share: (prompt - cached) / most, class: "is-own" },
  ];
  const isBad = one.status >= 400;
  return make(
    "li",
    { class: colourOf(one.backend) },
    make("time", { text: clock(one.at_wall_s) }),
    make(
      "span",
      {},
      make("strong", { text: one.backend }),
      ` ${words(one.affinity)} `,
      make("span", {
        class: isBad ? "bad" : "quiet",
        text: isBad ? `status ${one.status}` : words(one.reason),
      }),
    ),
    make("span", { title: told }, make("span", { class: "quiet", text: told }), bar(parts, told)),
    make("span", { class: "quiet", text: seconds(one.ttft_s) }),
  );
}

function moveOf(one) {
  return make(
    "li",
    { class: "move" },
    make("time", { text: clock(one.at_wall_s) }),
    make("span", { text: `moved ${one.before ?? "?"} → ${one.after}: ${words(one.reason)}` }),
  );
}

async function move(session, to) {
  const line = make("p", {
    text: `Its ${count(session.context_tokens)} tokens of context will be computed again on ${to} at its next turn.`,
  });
  if (!(await confirm(`Move the session to ${to}?`, "Move", line))) return;
  try {
    await post(`sessions/${session.key}/move`, { backend: to });
    toast(`session ${short(session.key)} now lives on ${to}`);
  } catch (error) {
    tell(error);
  }
  load(session.key);
}

async function end(session) {
  const line = make("p", { text: "Its home is forgotten; a later turn is placed anew." });
  if (!(await confirm("End the session?", "End", line))) return;
  try {
    await remove(`sessions/${session.key}`);
    toast(`session ${short(session.key)} is forgotten`);
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
      cell: (one) =>
        make("button", {
          type: "button",
          class: "link mono",
          text: short(one.key),
          "data-focus": `recent:${one.key}`,
          on: { click: () => load(one.key) },
        }),
    },
    { name: "Home", cell: (one) => named(one.backend) },
    { name: "Turns", kind: "number", cell: (one) => count(one.turns_seen) },
    { name: "Hit rate", kind: "number", cell: (one) => share(one.hit_rate) },
    { name: "Last", kind: "number", cell: (one) => ago(one.last_seen_wall_s, nowS) },
  ];
  replace(byId("recent-body"), table(columns, sessions.slice(0, 12), "No session yet"));
});

function tell(error) {
  if (!(error instanceof ApiError)) throw error;
  toast(error.message, { isBad: true });
}
