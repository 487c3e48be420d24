// A dry run of one request: which backend it would go to, why, and the price of the others.

import { ApiError, post } from "./api.js";
import { named } from "./colours.js";
import { toast } from "./dialogs.js";
import { bar, byId, make, replace, table } from "./dom.js";
import { count, seconds, words } from "./format.js";

export function startExplain() {
  byId("explain-form").addEventListener("submit", (event) => {
    event.preventDefault();
    decide();
  });
}

/** Go to the form and fill in what is known about a session. */
export function openExplain(sessionId, model) {
  if (sessionId) byId("explain-session").value = sessionId;
  if (model) byId("explain-model").value = model;
  byId("explain").scrollIntoView();
  byId("explain-session").focus({ preventScroll: true });
}

async function decide() {
  const session = byId("explain-session").value.trim();
  const system = byId("explain-system").value;
  const messages = [{ role: "user", content: byId("explain-message").value }];
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const headers = session ? { "x-session-id": session } : {};
  try {
    show(await post("route", { headers, body: { model: byId("explain-model").value.trim(), messages } }));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    toast(error.message, { isBad: true });
  }
}

function show(decision) {
  const prices = decision.candidates.map((candidate) => candidate.price).filter((price) => price !== null);
  const most = Math.max(1e-9, ...prices);
  const columns = [
    { name: "Candidate", kind: "title", cell: (candidate) => named(candidate.backend) },
    { name: "Reason", cell: (candidate) => words(candidate.reason) },
    {
      name: "Price",
      kind: "number",
      cell: (candidate) =>
        make(
          "span",
          { class: "with-bar" },
          make("span", { text: seconds(candidate.price) }),
          bar([{ share: (candidate.price ?? most) / most }], `price ${seconds(candidate.price)}`),
        ),
    },
    { name: "Wait", kind: "number", cell: (candidate) => seconds(candidate.wait_s) },
    { name: "Own prefill", kind: "number", cell: (candidate) => seconds(candidate.prefill_s) },
    {
      name: "Expected cached",
      kind: "number",
      cell: (candidate) => `${count(candidate.expected_cached_tokens)} of ${count(decision.prompt_tokens)}`,
    },
  ];
  const home = decision.binding
    ? `The session lives on ${decision.binding.backend} (${count(decision.binding.turns)} turns so far).`
    : decision.session
      ? "The session is not bound yet."
      : "It belongs to no session.";
  const sentence = make(
    "p",
    {},
    "This request would go to ",
    make("strong", { text: decision.backend }),
    `: ${words(decision.affinity)}, ${words(decision.reason)} (policy ${decision.policy}, key from ${words(decision.key_source)}). ${home}`,
  );
  replace(byId("explain-body"), sentence, table(columns, decision.candidates, "No candidates"));
}
