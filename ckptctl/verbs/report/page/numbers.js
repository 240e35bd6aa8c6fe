// Numbers as people read them; the same units as the command line. Whole numbers that JavaScript
// cannot hold, those beyond 2 ** 53, come as text: grouped and plus keep their digits, and
// everything else takes the nearest number.

const digits = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const grouped = (value) => digits.format(exact(value));
const exact = (value) => (typeof value === "string" ? BigInt(value) : value);

function plus(a, b) {
  const sum = Number(a) + Number(b);
  return Number.isSafeInteger(sum) ? sum : BigInt(a) + BigInt(b);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let [size, unit] = [Number(value), 0];
  while (size >= 1023.95 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${grouped(value)} B` : `${size.toFixed(1)} ${units[unit]}`;
}

function short(value) {
  const units = ["", " K", " M", " B", " T"];
  let [size, unit] = [Number(value), 0];
  while (size >= 999.5 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  if (unit === 0) return String(value);
  return size.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0) + units[unit];
}

// In short, and all digits where that leaves some out.
function both(value, brief) {
  const text = brief(value);
  return text.split(" ")[0] === grouped(value) ? text : `${text} (${grouped(value)})`;
}

function real(value, digits = 5) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return grouped(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e6) return String(Number(value.toPrecision(digits)));
  return value.toExponential(2);
}

// How values of a dtype are written: whole ones with all their digits.
const written = (dtype) => (/^(u?int|bool)/.test(dtype) ? (value) => (value === null ? "" : grouped(value)) : real);

function counted(count, noun, nouns = `${noun}s`) {
  return `${grouped(count)} ${Number(count) === 1 ? noun : nouns}`;
}

// All of it, or how much of how much; the total may be unknown.
function outOf(part, whole, write) {
  return Number(part) === Number(whole) ? write(whole) : `${write(part)} of ${write(whole)}`;
}

function share(part, whole) {
  if (!(Number(whole) > 0)) return "";
  const found = (100 * Number(part)) / Number(whole);
  return found > 0 && found < 0.05 ? "< 0.1 %" : `${found.toFixed(1)} %`;
}

const shape = (sizes) => `[${sizes.join(", ")}]`;

function box(chunk) {
  if (chunk.sizes.length === 0) return "the one element";
  return `[${chunk.offsets.map((offset, dim) => `${offset}:${plus(offset, chunk.sizes[dim])}`).join(", ")}]`;
}

// The order in which layers.2 comes before layers.10.
const natural = new Intl.Collator("en", { numeric: true }).compare;
