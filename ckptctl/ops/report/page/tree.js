// The modules of a model, from the dots in the names of its tensors.

function moduleTree(tensors, leftOut) {
  const root = branch("all tensors", "");
  for (const tensor of tensors) {
    if (tensor.alias_of === null && tensor.bytes > 0) plant(root, tensor);
  }
  joined(root);
  if (leftOut.bytes > 0) {
    const label = `${counted(leftOut.tensors, "tensor")} not listed`;
    const size = Number(leftOut.bytes);
    root.children.push({ ...branch(label, ""), bytes: size, tensors: leftOut.tensors, rest: true });
    root.children.sort((a, b) => b.bytes - a.bytes);
    root.bytes += size;
    root.tensors += leftOut.tensors;
  }
  return root;
}

function branch(label, path) {
  return { label, path, bytes: 0, tensors: 0, wrong: 0, children: [], byName: new Map(), tensor: null };
}

function plant(root, tensor) {
  const parts = tensor.name.split(".");
  let node = root;
  grow(node, tensor);
  parts.forEach((part, index) => {
    const last = index === parts.length - 1;
    let next = last ? undefined : node.byName.get(part);
    if (!next) {
      next = branch(part, parts.slice(0, index + 1).join("."));
      node.children.push(next);
      if (last) next.tensor = tensor;
      else node.byName.set(part, next);
    }
    grow(next, tensor);
    node = next;
  });
}

function grow(node, tensor) {
  node.bytes += Number(tensor.bytes);
  node.tensors += 1;
  node.wrong += tensor.missing > 0 ? 1 : 0;
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
