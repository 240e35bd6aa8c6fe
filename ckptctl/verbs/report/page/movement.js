// How far each layer moved from A to B: a bar for each layer, and a table.

function movement(report) {
  const layers = report.movement;
  if (!layers || layers.length === 0) return;
  const most = Math.max(0, ...layers.map((layer) => layer.relative ?? 0));
  const text = "L2 norm of the difference of a layer's elements, relative to their norm in A. All compared data was read.";
  const unclear = layers.filter((layer) => layer.relative === null).length;
  const note = unclear ? element("p", { class: "note" }, `${counted(unclear, "layer")} without a bar: elements are not finite, or all are zero in A.`) : null;
  const columns = [
    { title: "layer", text: (row) => row.name, sort: (row) => row.name, wide: true },
    { title: "relative", text: (row) => real(row.relative), sort: (row) => row.relative ?? -1, number: true },
    { title: "‖B − A‖", text: (row) => real(row.distance), sort: (row) => row.distance ?? -1, number: true, minor: true },
    { title: "‖A‖", text: (row) => real(row.norm), sort: (row) => row.norm ?? -1, number: true, minor: true },
    { title: "tensors", text: (row) => grouped(row.tensors), sort: (row) => row.tensors, number: true, minor: true },
  ];
  const table = lazyTable("Movement of layers", columns, [...layers], null, { inOrder: true });
  const plot = movementBars(layers, most);
  const ends = element("div", { class: "ends dim" }, element("span", {}, layers[0].name), element("span", {}, layers[layers.length - 1].name));
  const scale = element("p", { class: "dim" }, `Tallest bar: ${real(most)}`);
  section("movement", "Movement of layers", element("p", {}, text), note, element("div", { class: "movement" }, plot, ends, scale), table.node);
}

function movementBars(layers, most) {
  const picture = drawing("svg", {
    viewBox: `0 0 ${layers.length} 30`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": `Bar chart of the relative movement of ${counted(layers.length, "layer")}, at most ${real(most)}; the table has all numbers`,
  });
  layers.forEach((layer, index) => {
    const tall = most > 0 ? (28 * (layer.relative ?? 0)) / most : 0;
    const lines = () => [layer.name, layer.relative === null ? "not finite, or zero in A" : `moved by ${real(layer.relative)} of its norm`];
    const ground = drawing("rect", { class: "back", x: index, y: 0, width: 1, height: 30 });
    picture.append(withTip(ground, lines));
    picture.append(drawing("rect", { class: "bar-value", x: index + 0.06, y: 30 - tall, width: 0.88, height: tall }));
  });
  return picture;
}
