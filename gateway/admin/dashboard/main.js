// The page: polls the summary every two seconds (less often while that fails, not at all while the tab is
// hidden) and passes it to the views. Also keyboard shortcuts, theme and token.

import { ApiError, get, token } from "./api.js";
import { recolour } from "./charts.js";
import { learnBackends } from "./colours.js";
import { askToken, showHelp, toast } from "./dialogs.js";
import { byId, make, replace, whenChanged } from "./dom.js";
import { openExplain, startExplain } from "./explain.js";
import { showFleet, startFleet } from "./fleet.js";
import { showOverview, startOverview } from "./overview.js";
import { openSession, showSessions, startSessions } from "./sessions.js";

const POLL_MS = 2000;
const MAX_POLL_MS = 30000;

let pauseMs = POLL_MS;
let isPaused = false;
let isAsking = false;
let timer;

async function poll() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  try {
    show(await get("summary"));
    pauseMs = POLL_MS;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    pauseMs = Math.min(MAX_POLL_MS, pauseMs * 2);
    await showTrouble(error);
  } finally {
    isAsking = false;
    if (!isPaused && !document.hidden) timer = setTimeout(poll, pauseMs);
  }
}

function show(summary) {
  const { backends, session_store: store } = summary.status;
  const ready = backends.filter((backend) => backend.state === "ready").length;
  const isWhole = ready === backends.length && ready > 0 && !store.is_degraded;
  const words = isWhole
    ? "all backends ready"
    : `${ready} of ${backends.length} backends ready${store.is_degraded ? ", session store degraded" : ""}`;
  setHealth(`${summary.version} · ${words}`, isWhole ? "is-good" : ready ? "" : "is-bad");
  byId("token").hidden = token.get() === null;
  learnBackends(backends.map((backend) => backend.id));
  listModels([...new Set(backends.flatMap((backend) => backend.models ?? []))].sort());
  showFleet(summary);
  showOverview(summary);
  showSessions(summary);
}

const listModels = whenChanged((models) => {
  replace(byId("models"), ...models.map((value) => make("option", { value })));
  if (!byId("explain-model").value && models.length) byId("explain-model").value = models[0];
});

async function showTrouble(error) {
  if (error.status === 401) {
    setHealth(token.get() ? "the token was refused" : "this gateway needs a token", "is-bad");
    if (await askToken()) pauseMs = 0;
    return;
  }
  setHealth(`${error.message}; retrying in ${Math.round(pauseMs / 1000)} s`, "is-bad");
}

function setHealth(text, kind) {
  const node = byId("health");
  if (node.textContent !== text) node.textContent = text;
  node.className = `health ${kind}`;
}

function togglePause() {
  isPaused = !isPaused;
  byId("pause").textContent = isPaused ? "Resume" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (isPaused) clearTimeout(timer);
  else poll();
}

/** Cycle through the system's theme, light and dark. */
function nextTheme() {
  const root = document.documentElement;
  const next = { undefined: "light", light: "dark", dark: undefined }[root.dataset.theme];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  try {
    if (next) localStorage.setItem("homing-theme", next);
    else localStorage.removeItem("homing-theme");
  } catch {
    // storage is off: the choice is not saved
  }
  toast(`Theme: ${next ?? "system"}`);
  recolour();
}

function goTo(id) {
  byId(id).scrollIntoView();
  byId(id).focus({ preventScroll: true });
}

const KEYS = {
  "/": () => byId("session-id").focus(),
  f: () => goTo("fleet"),
  e: () => openExplain(),
  p: togglePause,
  t: nextTheme,
  "?": showHelp,
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, dialog") !== null;
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !isPaused) poll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
byId("pause").addEventListener("click", togglePause);
byId("theme").addEventListener("click", nextTheme);
byId("help").addEventListener("click", showHelp);
byId("token").addEventListener("click", async () => {
  await askToken();
  poll();
});

startFleet(poll);
startOverview(openSession);
startSessions((model) => openExplain(byId("session-id").value.trim(), model));
startExplain();
poll();
