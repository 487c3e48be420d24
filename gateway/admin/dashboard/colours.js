// One colour per backend, by its place in the alphabet, so that all parts of the page agree.

import { make } from "./dom.js";

const NUM_COLOURS = 8;
const places = new Map();

export function learnBackends(names) {
  places.clear();
  [...names].sort().forEach((name, place) => places.set(name, place));
}

/** The CSS class of a backend's colour; none for one that has left. */
export function colourOf(name) {
  return places.has(name) ? `b${places.get(name) % NUM_COLOURS}` : "";
}

/** A backend's name with its colour before it. */
export function named(name) {
  return make(
    "span",
    { class: "name", title: name },
    make("span", { class: `dot ${colourOf(name)}` }),
    make("span", { text: name }),
  );
}
