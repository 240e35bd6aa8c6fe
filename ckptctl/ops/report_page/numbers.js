// Numbers as people read them; the same units as the command line.

const grouped = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1023.95 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${grouped(value)} B` : `${value.toFixed(1)} ${units[unit]}`;
}

function short(value) {
  const units = ["", " K", " M", " B", " T"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  if (unit === 0) return String(value);
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0) + units[unit];
}

function real(value, digits = 5) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e6) return String(Number(value.toPrecision(digits)));
  return value.toExponential(2);
}

function counted(count, noun) {
  return `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function share(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "";
}

const shape = (sizes) => `[${sizes.join(", ")}]`;

function box(chunk) {
  if (chunk.sizes.length === 0) return "the one element";
  return `[${chunk.offsets.map((offset, dim) => `${offset}:${offset + chunk.sizes[dim]}`).join(", ")}]`;
}

// The order in which layers.2 comes before layers.10.
const natural = new Intl.Collator("en", { numeric: true }).compare;
