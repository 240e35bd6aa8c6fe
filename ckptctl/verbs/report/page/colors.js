// A color for each of a few kinds: a hue and a tone, so that the style sheet says how light it is.
// Green, yellow and red are none of them: they say complete, missing and damaged.

const HUES = [214, 282, 180, 322, 250];

function hueOf(index) {
  if (index < 2 * HUES.length) return { hue: HUES[index % HUES.length], deep: index >= HUES.length };
  return { hue: 165 + (Math.round(index * 137.508) % 170), deep: index % 2 === 1 };
}

function hues(kinds) {
  return new Map(kinds.map((kind, index) => [kind, hueOf(index)]));
}

function painted(node, color) {
  if (color !== undefined) {
    node.classList.add("painted");
    node.classList.toggle("deep", color.deep);
    node.style.setProperty("--hue", color.hue);
  }
  return node;
}

function swatch(color) {
  return painted(element("span", { class: "swatch" }), color);
}

// The second are states that are hatched.
function legend(entries, hatched = []) {
  const items = entries.map(([text, color]) => element("li", {}, swatch(color), text));
  for (const [text, state] of hatched) {
    items.push(element("li", {}, element("span", { class: `swatch hatched ${state}` }), text));
  }
  return element("ul", { class: "legend" }, items);
}

// How bad states are; of several the worst counts.
const STATES = ["complete", "unknown", "missing", "damaged"];

function worse(one, other) {
  return STATES.indexOf(one) >= STATES.indexOf(other) ? one : other;
}

// What it means for a tensor that a part of it should lie in a file.
function lossOf(file, files) {
  const state = file === null ? "missing" : files[file].state;
  return state === "present" ? "missing" : state;
}

function conditionOf(tensor, files) {
  return tensor.holes.map((hole) => lossOf(hole.file, files)).reduce(worse, tensor.missing > 0 ? "missing" : "complete");
}
