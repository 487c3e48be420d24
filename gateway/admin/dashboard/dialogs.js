// Dialogs and toasts.

import { token } from "./api.js";
import { byId, make, replace } from "./dom.js";

const TOAST_MS = 6000;

/** Ask for confirmation. Resolves to true on yes; Escape and Cancel mean no. */
export function confirm(title, yes, ...content) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-yes").textContent = yes;
  replace(byId("confirm-text"), ...content);
  return answerOf(dialog).then((answer) => answer === "yes");
}

/** Ask for the token, unless the dialog is already open. Resolves to whether a token is set now. */
export async function askToken() {
  const dialog = byId("token-dialog");
  if (dialog.open) return false;
  const input = byId("token-input");
  input.value = "";
  const answer = await answerOf(dialog);
  if (answer === "yes" && input.value.trim()) token.set(input.value.trim());
  input.value = "";
  return token.get() !== null;
}

export const showHelp = () => answerOf(byId("help-dialog"));

export function toast(text, { isBad = false } = {}) {
  const note = make("div", { class: isBad ? "toast is-bad" : "toast", text });
  byId("toasts").append(note);
  setTimeout(() => note.remove(), TOAST_MS);
}

const closed = new Map();

/** Show a dialog. Its last close event may still be due (it comes with an animation frame), so wait for that. */
async function answerOf(dialog) {
  await closed.get(dialog);
  dialog.returnValue = "no";
  dialog.showModal();
  const answer = new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }),
  );
  closed.set(dialog, answer);
  return answer;
}

byId("token-forget").addEventListener("click", () => {
  token.forget();
  byId("token-dialog").close("no");
});
