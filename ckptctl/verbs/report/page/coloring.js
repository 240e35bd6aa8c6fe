// What the colors of the treemap can say of a tensor.

const PARTS = 9;

// Each: its hues by what they mean, and what a tensor is; null: nothing worth a color.
function colorings(report) {
  const dtypes = hues(Object.keys(report.dtypes));
  const found = { dtype: { hues: dtypes, of: (tensor) => tensor.dtype }, part: partColoring(report.tensors), file: fileColoring(report) };
  if (report.difference) found.difference = differenceColoring(report.difference);
  return found;
}

// What the page starts with: what tells most.
function firstColoring(report) {
  if (report.difference && !report.difference.same) return "difference";
  const minor = Object.values(report.dtypes).filter((use) => Number(use.bytes) > 0.01 * Number(report.bytes));
  return minor.length > 1 ? "dtype" : "part";
}

// What a tensor is in its layer: q_proj, of model.layers.3.self_attn.q_proj.weight.
function partOf(name) {
  const words = name.split(".").filter((word) => !/^\d+$/.test(word));
  const last = words.pop() ?? name;
  const plain = last === "weight" || last === "bias";
  return (plain && words.pop()) || last;
}

function partColoring(tensors) {
  const parts = new Map();
  const sizes = new Map();
  for (const tensor of tensors) {
    if (tensor.alias_of !== null) continue;
    const part = partOf(tensor.name);
    parts.set(tensor, part);
    sizes.set(part, (sizes.get(part) || 0) + Number(tensor.bytes));
  }
  const largest = [...sizes].sort((a, b) => b[1] - a[1]).slice(0, PARTS).map(([part]) => part);
  const colors = hues(largest);
  const of = (tensor) => (colors.has(parts.get(tensor)) ? parts.get(tensor) : null);
  return { hues: colors, of, other: sizes.size > largest.length ? "other parts" : null };
}

// The file that a tensor lies in, or the rank that wrote it.
function fileColoring(report) {
  const largest = [...report.files].filter((file) => file.bytes !== null).sort((a, b) => Number(b.bytes) - Number(a.bytes)).slice(0, PARTS);
  const labels = new Map(largest.map((file) => [file.path, fileLabel(file)]));
  const of = (tensor) => {
    const places = new Set(tensor.map.map((chunk) => chunk.file));
    const [file] = places;
    return places.size === 1 && file !== null ? labels.get(report.files[file].path) ?? null : null;
  };
  return { hues: hues([...labels.values()].sort(natural)), of, other: "several files, or a smaller file" };
}

function differenceColoring(difference) {
  const meanings = { shape: "different shape", dtype: "different dtype", values: "different values" };
  const kinds = new Map(difference.tensors.map((one) => [one.name, meanings[one.kinds[0]]]));
  for (const name of difference.a.only) kinds.set(name, "only in A");
  const colors = hues(["different values", "different dtype", "only in A", "different shape"]);
  const used = new Set(kinds.values());
  return {
    hues: new Map([...colors].filter(([kind]) => used.has(kind))),
    of: (tensor) => kinds.get(tensor.name) ?? null,
    other: "equal, or not compared",
  };
}

// What most bytes under a node are that have a color.
function mainKind(node, mode, of) {
  node.kinds ??= new Map();
  if (!node.kinds.has(mode)) {
    const sums = new Map();
    const pending = [node];
    while (pending.length > 0) {
      const one = pending.pop();
      if (!one.tensor) pending.push(...one.children);
      else if (of(one.tensor) !== null) sums.set(of(one.tensor), (sums.get(of(one.tensor)) || 0) + one.bytes);
    }
    const most = [...sums].sort((a, b) => b[1] - a[1])[0];
    node.kinds.set(mode, most ? most[0] : null);
  }
  return node.kinds.get(mode);
}
