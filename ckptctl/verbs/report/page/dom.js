// Elements are made here and nowhere else. What a checkpoint says is only ever text of a node or
// the value of an attribute that runs nothing.

function element(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, READ.has(name) ? visible(value) : value);
    }
  }
  const shown = children.flat(2).filter((child) => child !== null && child !== undefined);
  node.append(...shown.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

// A message of the program: what stands between backticks is code.
function prose(text) {
  const parts = String(text).split(/`([^`]+)`/);
  return parts.map((part, index) => (index % 2 ? element("code", {}, part) : part));
}

const READ = new Set(["title", "aria-label"]);

// What would not be seen, or would turn the text around, as an escape.
function visible(text) {
  const escape = (one) => `\\u{${one.codePointAt(0).toString(16)}}`;
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, escape);
}

// Styles are set one by one: the page's policy forbids style attributes.
function styled(node, styles) {
  for (const [name, value] of Object.entries(styles)) node.style.setProperty(name, value);
  return node;
}

function section(id, title, ...children) {
  const heading = element("h2", { id: `${id}-title` }, title);
  const found = element("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
  document.getElementById("sections").append(found);
  const link = element("a", { href: `#${id}` }, title);
  document.getElementById("contents").append(link);
  return found;
}

function choice(label, options, chosen, changed) {
  const select = element(
    "select",
    { change: () => changed(select.value) },
    options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)),
  );
  return element("label", { class: "choice" }, `${label} `, select);
}

const tip = document.getElementById("tip");
document.addEventListener("scroll", () => (tip.hidden = true), { capture: true, passive: true });

function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line) => element("div", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.max(4, Math.min(x + 14, window.innerWidth - box.width - 8));
  const below = y + 18 + box.height < window.innerHeight;
  styled(tip, { left: `${left}px`, top: `${below ? y + 18 : Math.max(4, y - box.height - 10)}px` });
}

function withTip(node, lines) {
  node.addEventListener("pointermove", (event) => showTip(lines(), event.clientX, event.clientY));
  node.addEventListener("pointerleave", () => (tip.hidden = true));
  // A listener for the focus would make a shape a stop of the Tab key.
  if (node instanceof SVGElement) return node;
  node.addEventListener("focus", () => {
    if (!node.matches(":focus-visible")) return;
    const box = node.getBoundingClientRect();
    showTip(lines(), box.left, box.top + Math.min(box.height, 24));
  });
  node.addEventListener("blur", () => (tip.hidden = true));
  return node;
}
