// The only way this page creates elements. Values from the gateway become text nodes or known attributes, never
// markup: we do not control the names of backends, models and sessions.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element: `make("td", {class: "number", text: 3, on: {click}}, ...children)`. */
export function make(tag, options = {}, ...children) {
  return fill(document.createElement(tag), options, children);
}

/** The same for SVG. */
export function draw(tag, options = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), options, children);
}

function fill(node, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = String(value);
    else if (name === "on")
      for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Replace the children and restore focus to the control that had it (matched by `data-focus`). */
export function replace(container, ...children) {
  const focused = container.contains(document.activeElement)
    ? document.activeElement.dataset.focus
    : undefined;
  container.replaceChildren(...children.filter(Boolean));
  if (focused === undefined) return;
  const again = [...container.querySelectorAll("[data-focus]")].find((control) => control.dataset.focus === focused);
  if (again) again.focus({ preventScroll: true });
}

/** Render only when the data has changed, so that text in a table can be read and selected. */
export function whenChanged(render) {
  let before;
  return (value, ...more) => {
    const now = JSON.stringify([value, ...more]);
    if (now === before) return;
    before = now;
    render(value, ...more);
  };
}

/**
 * A table. A column is {name, cell(row) -> Node or text, kind}: kind is "number", "title" or "actions".
 * On a narrow screen each row becomes a card and each cell names its column.
 */
export function table(columns, rows, emptyText) {
  if (!rows.length) return make("p", { class: "empty", text: emptyText });
  const heads = columns.map((column) => make("th", { class: column.kind, scope: "col", text: column.name }));
  const lines = rows.map((row) =>
    make(
      "tr",
      {},
      ...columns.map((column) =>
        make("td", { class: column.kind, "data-label": column.name || null }, asNode(column.cell(row))),
      ),
    ),
  );
  const found = make(
    "table",
    { class: "cards" },
    make("thead", {}, make("tr", {}, ...heads)),
    make("tbody", {}, ...lines),
  );
  return make("div", { class: "scroll" }, found);
}

function asNode(value) {
  return value instanceof Node
    ? value
    : document.createTextNode(value === null || value === undefined ? "–" : String(value));
}

/** A bar made of parts {share, class}; each share is a fraction of the whole, 0 to 1. */
export function bar(parts, label) {
  const svg = draw("svg", {
    class: "bar",
    viewBox: "0 0 100 1",
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": label,
  });
  let start = 0;
  for (const part of parts) {
    const width = Math.max(0, Math.min(1, part.share)) * 100;
    svg.append(draw("rect", { x: start, y: 0, width, height: 1, class: part.class }));
    start += width;
  }
  return svg;
}
