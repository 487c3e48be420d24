// One colour per backend, by alphabetical position, so that all parts of the page agree.

import { make } from "./dom.js";

const NUM_COLOURS = 8;
const places = new Map();

export function learnBackends(names) {
  places.clear();
  [...names].sort().forEach((name, place) => places.set(name, place));
}

/** The CSS class of a backend's colour; empty for a backend that is no longer in the fleet. */
export function colourOf(name) {
  return places.has(name) ? `b${places.get(name) % NUM_COLOURS}` : "";
}

/** A backend's name, preceded by its colour. */
export function named(name) {
  return make(
    "span",
    { class: "name", title: name },
    make("span", { class: `dot ${colourOf(name)}` }),
    make("span", { text: name }),
  );
}
