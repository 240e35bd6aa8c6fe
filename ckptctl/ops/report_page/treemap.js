// The parameters by bytes: a click on a module shows what is in it, one on a tensor its details.

const CELLS = 150;
const CELLS_IN_ALL = 3000;
const DEPTH = 4;
const AREA = 60;
const HEAD = 20;

function treemap(report, open) {
  const root = moduleTree(report.tensors, report.left_out);
  const differing = new Set(report.difference ? report.difference.tensors.map((one) => one.name) : []);
  const kinds = hues(Object.keys(report.dtypes));
  const map = element("div", { class: "treemap", role: "group", "aria-label": "Treemap of the tensors by bytes; arrow keys move, Enter opens, Escape leaves a module" });
  const trail = element("nav", { class: "trail", "aria-label": "Where the treemap is" });
  const key = element("div");
  let path = [root];
  let mode = "dtype";
  let size = [0, 0];

  function zoom(nodes, focus) {
    path = nodes;
    draw();
    const first = focus && map.querySelector("button");
    if (first) first.focus();
  }

  function hueOfNode(node, top) {
    if (mode === "module") return top;
    if (mode === "difference") return differs(node) ? 10 : undefined;
    return kinds.get(mainDtype(node));
  }

  function differs(node) {
    if (node.tensor) return differing.has(node.tensor.name);
    return node.children.some(differs);
  }

  function cell(node, rectangle, top, nodes) {
    const [left, up, width, height] = rectangle;
    const label = width > 34 && height > 15 ? element("span", {}, node.label) : null;
    const amount = label && width > 56 ? element("small", {}, bytes(node.bytes)) : null;
    const lines = () => described(node, root.bytes);
    const button = element(
      "button",
      {
        class: `cell${label ? "" : " bare"}${node.wrong ? " wrong" : ""}`,
        tabindex: "-1",
        "aria-label": lines().join(", "),
        click: () => {
          tip.hidden = true;
          if (node.tensor) open(node.tensor.name);
          else if (!node.rest) zoom(nodes, true);
        },
      },
      label,
      amount,
    );
    // In per cent, so that the cells stay in place when the page is printed.
    const across = (value) => `${(100 * value) / size[0]}%`;
    const down = (value) => `${(100 * value) / size[1]}%`;
    styled(button, { left: across(left), top: down(up), width: across(width), height: down(height) });
    map.append(withTip(painted(button, node.rest ? undefined : hueOfNode(node, top)), lines));
    return button;
  }

  // Level by level, so that what there is room for is spread evenly.
  function draw() {
    map.replaceChildren();
    const here = path[path.length - 1];
    size = [map.clientWidth, map.clientHeight];
    const whole = [0, 0, ...size];
    const pending = [{ node: here, room: whole, nodes: path, hue: null, items: itemsOf(here, whole) }];
    drawTrail();
    drawKey(pending[0].items);
    for (let level = pending.shift(); level; level = pending.shift()) {
      if (map.childElementCount + level.items.length > CELLS_IN_ALL) continue;
      if (level.button) level.button.classList.add("module");
      pending.push(...fill(level));
    }
    if (map.firstChild) map.firstChild.tabIndex = 0;
  }

  // Draws the children of a module and returns those that have room for theirs.
  function fill({ room, nodes, hue, items }) {
    const places = squarified(items.map((item) => item.bytes), ...room);
    return places.flatMap((place, index) => {
      const [left, top, width, height] = place;
      if (width < 2 || height < 2) return [];
      const item = items[index];
      const own = hue === null ? hueOf(index) : hue;
      const inside = [...nodes, item];
      const button = cell(item, place, own, inside);
      const roomy = width > 56 && height > 44 && inside.length - path.length <= DEPTH;
      if (!roomy || item.tensor || item.rest) return [];
      const inner = [left + 3, top + HEAD, width - 7, height - HEAD - 4];
      return [{ node: item, room: inner, nodes: inside, hue: own, items: itemsOf(item, inner), button }];
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
      element("span", { class: "dim" }, ` ${bytes(node.bytes)}, ${counted(node.tensors, "tensor")}`),
    );
  }

  function drawKey(items) {
    const entries = { dtype: [...kinds], difference: [["differs", 10]] };
    const modules = items.slice(0, 8).map((item, index) => [item.label, item.rest ? undefined : hueOf(index)]);
    key.replaceChildren(legend(entries[mode] || modules));
  }

  const modes = [["dtype", "dtype"], ["module", "module"]];
  if (report.difference) modes.push(["difference", "difference"]);
  const colour = choice("Colour by", modes, mode, (value) => {
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
  const note = shared ? element("p", { class: "dim" }, `${counted(shared, "tensor")} that share memory with another have no area of their own.`) : null;
  section("treemap", "Treemap", element("div", { class: "bar" }, trail, colour), map, key, note);
  new ResizeObserver(() => {
    if (map.clientWidth !== size[0] || map.clientHeight !== size[1]) draw();
  }).observe(map);
  draw();
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
  for (const one of rest) {
    sum.bytes += one.bytes;
    sum.tensors += one.tensors;
    sum.wrong += one.wrong;
  }
  sum.children = rest;
  return [...node.children.slice(0, limit - 1), sum];
}

function mainDtype(node) {
  if (node.mainDtype) return node.mainDtype;
  const sums = new Map();
  const pending = [node];
  while (pending.length > 0) {
    const one = pending.pop();
    if (one.tensor) sums.set(one.tensor.dtype, (sums.get(one.tensor.dtype) || 0) + one.bytes);
    else pending.push(...one.children);
  }
  node.mainDtype = [...sums].sort((a, b) => b[1] - a[1]).map(([name]) => name)[0];
  return node.mainDtype;
}

function described(node, whole) {
  const size = `${bytes(node.bytes)}, ${share(node.bytes, whole)}`;
  const wrong = node.wrong ? [`${node.tensor ? "" : `${grouped(node.wrong)} `}incomplete`] : [];
  if (node.tensor) {
    return [node.tensor.name, `${node.tensor.dtype} ${shape(node.tensor.shape)}`, size, ...wrong];
  }
  return [node.path || node.label, counted(node.tensors, "tensor"), size, ...wrong];
}
