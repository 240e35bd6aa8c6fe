// The modules of a model, from the dots in the names of its tensors.

function moduleTree(report) {
  const root = branch("all tensors", "");
  const folds = new Map();
  const unfold = report.tensors.every((tensor) => tensor.part !== "model");
  for (const tensor of report.tensors) {
    if (tensor.alias_of !== null || !(tensor.bytes > 0)) continue;
    const state = conditionOf(tensor, report.files);
    if (unfold || !FOLDED.includes(tensor.part)) {
      plant(root, tensor, state);
      continue;
    }
    if (!folds.has(tensor.part)) folds.set(tensor.part, { ...branch(tensor.part, ""), fold: true });
    plant(folds.get(tensor.part), tensor, state);
    grow(root, tensor, state);
  }
  joined(root);
  const others = FOLDED.flatMap((part) => folds.get(part) ?? []);
  others.forEach(joined);
  root.children.push(...others);
  if (report.left_out.bytes > 0) {
    const { tensors, bytes: size } = report.left_out;
    addRest(root, { label: `${counted(tensors, "tensor")} not listed`, bytes: Number(size), tensors });
  }
  const gone = Number(report.total_bytes) - Number(report.bytes);
  if (gone > 0) {
    const state = report.files.some((file) => file.state === "damaged") ? "damaged" : "missing";
    const label = `${counted(report.missing_tensors, "tensor")} missing`;
    addRest(root, { label, bytes: gone, missing: gone, tensors: report.missing_tensors, wrong: report.missing_tensors, state });
  }
  return root;
}

// What is not told apart, as one.
function addRest(root, sums) {
  const node = { ...branch("", ""), ...sums, rest: true };
  const place = root.children.findIndex((child) => child.fold || child.bytes < node.bytes);
  root.children.splice(place < 0 ? root.children.length : place, 0, node);
  add(root, node);
}

function add(node, other) {
  for (const sum of ["bytes", "missing", "tensors", "wrong"]) node[sum] += other[sum];
  node.state = worse(node.state, other.state);
}

function branch(label, path) {
  const sums = { bytes: 0, missing: 0, tensors: 0, wrong: 0, state: "complete" };
  return { label, path, ...sums, children: [], byName: new Map(), tensor: null };
}

function plant(root, tensor, state) {
  const parts = tensor.name.split(".");
  let node = root;
  grow(node, tensor, state);
  parts.forEach((part, index) => {
    const last = index === parts.length - 1;
    let next = last ? undefined : node.byName.get(part);
    if (!next) {
      next = branch(part, parts.slice(0, index + 1).join("."));
      node.children.push(next);
      if (last) next.tensor = tensor;
      else node.byName.set(part, next);
    }
    grow(next, tensor, state);
    node = next;
  });
}

function grow(node, tensor, state) {
  const [bytes, missing] = [Number(tensor.bytes), Number(tensor.missing_bytes ?? 0)];
  add(node, { bytes, missing, tensors: 1, wrong: tensor.missing > 0 ? 1 : 0, state });
}

// A module that holds one module and nothing else is one with it: "model.layers".
function joined(root) {
  const pending = [root];
  while (pending.length > 0) {
    const node = pending.pop();
    node.children = node.children.map((child) => {
      let found = child;
      let label = child.label;
      while (!found.tensor && found.children.length === 1) {
        found = found.children[0];
        label = `${label}.${found.label}`;
      }
      found.label = label;
      return found;
    });
    node.children.sort((a, b) => b.bytes - a.bytes || natural(a.label, b.label));
    pending.push(...node.children);
  }
}

// Rectangles for values, largest first, none of them much longer than wide.
// Source: Bruls, Huizing, van Wijk, "Squarified Treemaps" (2000).
function squarified(values, left, top, width, height) {
  const found = [];
  let total = values.reduce((sum, value) => sum + value, 0);
  let index = 0;
  while (index < values.length && total > 0) {
    const side = Math.min(width, height);
    const scale = (width * height) / total;
    let end = index;
    let sum = 0;
    let worst = Infinity;
    while (end < values.length) {
      const next = sum + values[end];
      const depth = (next * scale) / side;
      const ratio = Math.max(...[values[index], values[end]].map((value) => {
        const length = (value * scale) / depth;
        return Math.max(length / depth, depth / length);
      }));
      if (end > index && ratio > worst) break;
      [worst, sum, end] = [ratio, next, end + 1];
    }
    const depth = (sum * scale) / side;
    let place = 0;
    for (; index < end; index += 1) {
      const length = (values[index] * scale) / depth;
      found.push(width >= height ? [left, top + place, depth, length] : [left + place, top, length, depth]);
      place += length;
    }
    if (width >= height) [left, width] = [left + depth, width - depth];
    else [top, height] = [top + depth, height - depth];
    total -= sum;
  }
  return found;
}
