// A colour for each of a few kinds: as a hue, so that the style sheet says how light it is.

const HUES = [214, 30, 140, 275, 48, 340, 180, 95, 245, 10, 160, 310];

function hueOf(index) {
  return index < HUES.length ? HUES[index] : Math.round((index * 137.508) % 360);
}

function hues(kinds) {
  return new Map(kinds.map((kind, index) => [kind, hueOf(index)]));
}

function painted(node, hue) {
  if (hue !== undefined) {
    node.classList.add("painted");
    node.style.setProperty("--hue", hue);
  }
  return node;
}

function swatch(hue) {
  return painted(element("span", { class: "swatch" }), hue);
}

function legend(entries, alarming = null) {
  const items = entries.map(([text, hue]) => element("li", {}, swatch(hue), text));
  if (alarming) items.push(element("li", {}, element("span", { class: "swatch wrong" }), alarming));
  return element("ul", { class: "legend" }, items);
}
