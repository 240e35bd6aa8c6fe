// The parameters by bytes: a click on a module shows what is in it, one on a tensor its details.

const CELLS = 150;
const CELLS_IN_ALL = 3000;
const DEPTH = 7;
const AREA = 60;
const HEAD = 20;
const LETTER = 6.2;

function treemap(report, open) {
  const root = moduleTree(report);
  const modes = colorings(report);
  const map = element("div", { class: "treemap", role: "group", "aria-label": "Treemap of tensors by bytes. Use arrow keys to move, Enter to open, Escape to leave a module." });
  const trail = element("nav", { class: "trail", "aria-label": "Position in the treemap" });
  const key = element("div");
  const states = new Set([...report.tensors.map((tensor) => conditionOf(tensor, report.files)), root.state]);
  const hatched = [["missing", "missing"], ["lost (file damaged)", "damaged"], ["unknown", "unknown"]].filter(([, state]) => states.has(state));
  const drawn = new Set();
  let path = [root];
  let mode = firstColoring(report);
  let size = [0, 0];

  function zoom(nodes, focus) {
    path = nodes;
    draw();
    const first = focus && map.querySelector("button");
    if (first) first.focus();
  }

  function cell(node, rectangle, nodes) {
    const [left, up, width, height] = rectangle;
    const upright = width < LETTER * node.label.length && height > 2 * width && width > 18;
    const roomy = width > 8 + LETTER * Math.min(4, node.label.length) && height > 15;
    const label = upright || roomy ? element("span", {}, node.label) : null;
    const amount = label && (upright ? width > 32 : width > 56 && height > 30) ? element("small", {}, amountOf(node)) : null;
    const kind = node.rest || node.fold ? undefined : mainKind(node, mode, modes[mode].of);
    const lines = () => described(node, root.bytes);
    const button = element(
      "button",
      {
        class: `cell${label ? "" : " bare"}${upright ? " upright" : ""}${node.wrong ? ` wrong ${node.state}` : ""}${node.fold ? " fold" : ""}`,
        tabindex: "-1",
        "aria-label": lines().join(", "),
        click: () => {
          tip.hidden = true;
          if (node.tensor) open(node.tensor.name);
          else if (!node.rest) zoom(nodes, true);
          else if (node.wrong) document.getElementById("findings").scrollIntoView();
        },
      },
      label,
      amount,
      hole(node, upright),
    );
    // In per cent, so that the cells stay in place when the page is printed.
    const across = (value) => `${(100 * value) / size[0]}%`;
    const down = (value) => `${(100 * value) / size[1]}%`;
    styled(button, { left: across(left), top: down(up), width: across(width), height: down(height) });
    drawn.add(kind);
    map.append(withTip(painted(button, modes[mode].hues.get(kind)), lines));
    return button;
  }

  // Level by level, so that what there is room for is spread evenly.
  function draw() {
    map.replaceChildren();
    const here = path[path.length - 1];
    size = [map.clientWidth, map.clientHeight];
    const whole = [0, 0, ...size];
    const pending = [{ room: whole, nodes: path, items: itemsOf(here, whole) }];
    drawTrail();
    drawn.clear();
    for (let level = pending.shift(); level; level = pending.shift()) {
      if (map.childElementCount + level.items.length > CELLS_IN_ALL) continue;
      if (level.button) headed(level.button, level.room[2]);
      pending.push(...fill(level));
    }
    drawKey();
    if (map.firstChild) map.firstChild.tabIndex = 0;
  }

  // Draws the children of a module and returns those that have room for theirs.
  function fill({ room, nodes, items }) {
    const places = squarified(items.map((item) => item.bytes), ...room);
    return places.flatMap((place, index) => {
      const [left, top, width, height] = place;
      if (width < 2 || height < 2) return [];
      const item = items[index];
      const inside = [...nodes, item];
      const button = cell(item, place, inside);
      const roomy = width > 56 && height > 44 && inside.length - path.length <= DEPTH;
      if (!roomy || item.tensor || item.rest || item.fold) return [];
      const inner = [left + 3, top + HEAD, width - 7, height - HEAD - 4];
      return [{ room: inner, nodes: inside, items: itemsOf(item, inner), button }];
    });
  }

  function drawTrail() {
    const steps = path.map((node, index) => {
      const here = index === path.length - 1;
      if (here) return element("span", { "aria-current": "location" }, node.label);
      return element("button", { class: "link", click: () => zoom(path.slice(0, index + 1), true) }, node.label);
    });
    const node = path[path.length - 1];
    trail.replaceChildren(
      ...steps.flatMap((step, index) => (index ? [" › ", step] : [step])),
      element("span", { class: "dim" }, ` ${outOf(node.bytes - node.missing, node.bytes, bytes)}${node.missing ? " present" : ""}, ${counted(node.tensors, "tensor")}`),
    );
  }

  function drawKey() {
    const { hues: colors, other } = modes[mode];
    const entries = [...colors].filter(([kind]) => drawn.has(kind));
    if (other && drawn.has(null)) entries.push([other, undefined]);
    key.replaceChildren(legend(entries, hatched));
  }

  const color = choice("Color by", Object.keys(modes).map((name) => [name, name]), mode, (value) => {
    mode = value;
    draw();
  });
  map.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) walk(event.target, step);
    else if (event.key === "Escape" && path.length > 1) zoom(path.slice(0, -1), true);
    else return;
    event.preventDefault();
  });
  const shared = report.tensors.filter((tensor) => tensor.alias_of !== null).length;
  const notes = shared ? [`${counted(shared, "tensor")} ${shared === 1 ? "shares" : "share"} memory with another tensor and ${shared === 1 ? "has" : "have"} no separate area.`] : [];
  if (report.total_bytes === null) notes.push(`${counted(report.missing_tensors, "tensor")} missing without an area, because the size is unknown.`);
  section("treemap", "Treemap", element("div", { class: "bar" }, trail, color), map, key, notes.map((note) => element("p", { class: "dim" }, note)));
  new ResizeObserver(() => {
    if (map.clientWidth !== size[0] || map.clientHeight !== size[1]) draw();
  }).observe(map);
  draw();
}

// Turns a cell into the head of what is drawn in it.
function headed(button, width) {
  button.classList.add("module");
  const gone = button.querySelector(".gone");
  if (gone) gone.remove();
  const [name, amount] = button.children;
  if (amount && width < 1.2 * LETTER * name.textContent.length + 60) amount.remove();
}

function itemsOf(node, [, , width, height]) {
  return few(node, Math.min(CELLS, Math.ceil((width * height) / AREA)));
}

// Only one cell can be reached with Tab: the one that was left last.
function walk(cell, step) {
  const next = step > 0 ? cell.nextElementSibling : cell.previousElementSibling;
  if (!next) return;
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// The largest children, and what is left of them as one.
function few(node, limit) {
  if (node.children.length <= limit) return node.children;
  const rest = node.children.slice(limit - 1);
  const sum = branch(`${grouped(rest.length)} smaller`, "");
  for (const one of rest) add(sum, one);
  sum.children = rest;
  return [...node.children.slice(0, limit - 1), sum];
}

// The part of a cell that is not there.
function hole(node, upright) {
  if (!node.missing) return null;
  const part = `${(100 * node.missing) / node.bytes}%`;
  return styled(element("span", { class: "gone hatched" }), upright ? { height: part, width: "100%" } : { width: part, height: "100%" });
}

function amountOf(node) {
  const tensors = node.fold ? `, ${counted(node.tensors, "tensor")}` : "";
  const whole = node.missing === 0 || node.missing === node.bytes;
  return `${bytes(node.bytes)}${whole ? "" : `, ${bytes(node.missing)} missing`}${tensors}`;
}

function described(node, whole) {
  const size = `${bytes(node.bytes)}, ${share(node.bytes, whole)}`;
  const wrong = node.wrong ? [`${node.tensor ? "" : `${grouped(node.wrong)} not complete: `}${bytes(node.missing)} missing`] : [];
  if (node.tensor) {
    return [node.tensor.name, `${node.tensor.dtype} ${shape(node.tensor.shape)}`, size, ...wrong];
  }
  return [node.path || node.label, counted(node.tensors, "tensor"), size, ...wrong];
}
