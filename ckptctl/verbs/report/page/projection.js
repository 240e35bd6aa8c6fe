// The picture of a chunk map: the boxes of a tensor on two of its axes.

const MAP_WIDTH = 1000;
const BOXES = 2000;

// A box as [left, top, width, height] in units of elements.
function projected(chunk, tensor, rows, columns) {
  const count = tensor.shape.length;
  if (count === 0) return [0, 0, 1, 1];
  if (count === 1) return [chunk.offsets[0], 0, chunk.sizes[0], 1];
  return [chunk.offsets[columns], chunk.offsets[rows], chunk.sizes[columns], chunk.sizes[rows]];
}

// The picture's width and height; as the tensor is, as far as that can be looked at.
function frame(tensor, rows, columns) {
  const count = tensor.shape.length;
  if (count === 0) return [160, 160];
  if (count === 1 || tensor.shape.includes(0)) return [MAP_WIDTH, 90];
  const tall = tensor.map.length + tensor.holes.length > 1 ? 420 : 120;
  const ratio = aspect(tensor, rows, columns);
  const height = Math.min(tall, MAP_WIDTH * ratio);
  return [height / ratio, height];
}

// Height by width: that of the tensor, unless parts could not be told from each other or labeled.
function aspect(tensor, rows, columns) {
  const cuts = new Set([...tensor.map, ...tensor.holes].map((chunk) => chunk.offsets[rows])).size;
  const least = Math.min(0.42, Math.max(0.12, 0.028 * cuts));
  return Math.min(2, Math.max(least, tensor.shape[rows] / tensor.shape[columns]));
}

function distorted(tensor, rows, columns) {
  return aspect(tensor, rows, columns) !== tensor.shape[rows] / tensor.shape[columns];
}

// Units of a picture for each pixel of the screen, so that labels are as large as other text.
function unitsPerPixel() {
  return MAP_WIDTH / Math.max(240, Math.min(window.innerWidth * 0.96, 992) - 44);
}

function projection(tensor, boxes, holes, rows, columns, color, chosen) {
  const count = tensor.shape.length;
  const [width, height] = frame(tensor, rows, columns);
  const across = count === 0 ? 1 : tensor.shape[count === 1 ? 0 : columns];
  const down = count < 2 ? 1 : tensor.shape[rows];
  const picture = drawing("svg", {
    viewBox: `-2 -2 ${width + 4} ${height + 4}`,
    role: "img",
    "aria-label": `Chunk map: ${tensor.chunks} chunks, ${tensor.missing} missing`,
  });
  styled(picture, { width: `${(100 * width) / MAP_WIDTH}%` });
  const scale = [width / Math.max(1, across), height / Math.max(1, down)];
  picture.append(drawing("rect", { class: "ground", x: 0, y: 0, width, height }));
  if (tensor.shape.includes(0)) return picture;
  const places = stacked([...boxes, ...holes], tensor, rows, columns);
  places.sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state));
  const labeled = places.length <= 64;
  for (const place of places.slice(-BOXES)) {
    picture.append(...pictured(place, scale, color, chosen, labeled));
  }
  return picture;
}

// Boxes that lie on top of each other, as one place.
function stacked(all, tensor, rows, columns) {
  const found = new Map();
  for (const chunk of all) {
    const place = projected(chunk, tensor, rows, columns);
    const key = place.join();
    const known = found.get(key) || { place, chunks: [], state: "complete" };
    known.chunks.push(chunk);
    known.state = worse(known.state, chunk.state || "complete");
    found.set(key, known);
  }
  return [...found.values()];
}

function pictured({ place, chunks, state }, scale, color, chosen, labeled) {
  const wrong = state !== "complete";
  const [left, top] = [place[0] * scale[0], place[1] * scale[1]];
  let [width, height] = [place[2] * scale[0], place[3] * scale[1]];
  if (wrong) [width, height] = [Math.max(width, 4), Math.max(height, 4)];
  const lit = chosen === null || chunks.some((chunk) => chunk.label === chosen);
  const small = width < 8 || height < 8;
  const kind = `chunk${wrong ? ` hole ${state}` : ""}${small ? " tiny" : ""}${lit ? "" : " faint"}`;
  const rectangle = drawing("rect", { class: kind, x: left, y: top, width, height });
  if (!wrong) painted(rectangle, color.get(chunks[0].label));
  withTip(rectangle, () => stackLines(chunks));
  const text = wrong ? (state === "missing" ? "missing" : "lost") : rankOf(chunks[0].label) || chunks[0].label;
  const unit = unitsPerPixel();
  if (!labeled || width < (16 + 8 * text.length) * unit || height < 20 * unit) return [rectangle];
  const at = { x: left + width / 2, y: top + height / 2, class: "label" };
  return [rectangle, styled(drawing("text", at, text), { "font-size": `${14 * unit}px` })];
}

function stackLines(chunks) {
  const lines = chunks.slice(0, 6).map((chunk) => `${box(chunk)} ${chunk.label}`);
  if (chunks.length > lines.length) lines.push(`and ${grouped(chunks.length - lines.length)} more`);
  return lines;
}
