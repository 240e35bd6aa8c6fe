// Where two checkpoints differ, the worst first.

function difference(report, open) {
  if (report.other === null) return;
  const found = report.difference;
  if (!found) {
    const error = report.difference_error;
    const lines = [error.message, error.where, error.why, error.hint].filter(Boolean);
    section("differences", "Differences", element("p", {}, "A could not be compared with B:"),
      element("ul", { class: "findings" }, element("li", { class: "damaged" }, lines.map((line) => element("div", {}, prose(line))))));
    return;
  }
  const parts = [element("p", {}, verdict(report, found))];
  if (found.tensors.length > 0) parts.push(differing(found, open));
  parts.push(
    names("Only in A", [...found.a.only, ...found.a.only_leaves]),
    names("Only in B", [...found.b.only, ...found.b.only_leaves]),
    names("Non-tensor values that differ", found.leaves.map((leaf) => `${leaf.name}: ${leaf.a} in A, ${leaf.b} in B`)),
    names("Not compared", [found.a, found.b].flatMap((side) => Object.entries(side.left_out).map(([name, why]) => [`${name}: `, prose(why)]))),
    ...found.notes.map((note) => element("p", { class: "dim" }, prose(note))),
  );
  section("differences", "Differences", parts);
}

const COMPARED_BY = {
  data: "names, shapes, dtypes and values",
  checksums: "names, shapes, dtypes, and values or recorded checksums",
  structure: "names, shapes and dtypes",
};

function verdict(report, found) {
  const said = [`A and B: ${found.verdict}.`];
  const count = found.tensors.length;
  const least = report.left_out.differences > 0 ? "At least " : "";
  if (count > 0) said.push(`${least}${counted(count, "tensor")} ${count === 1 ? "differs" : "differ"}.`);
  said.push(`${counted(found.compared, "tensor")} compared by ${COMPARED_BY[found.evidence]}.`);
  if (found.evidence !== "structure") said.push(`Data read: ${bytes(found.a.bytes_read)} from A, ${bytes(found.b.bytes_read)} from B.`);
  if (found.by_checksum) said.push(`Recorded checksums match for ${counted(found.by_checksum, "tensor")}; their data was not read.`);
  if (found.within) said.push(`${counted(found.within, "tensor")} ${found.within === 1 ? "differs" : "differ"} within the tolerances.`);
  return said.join(" ");
}

function differing(found, open) {
  const value = (row, key) => (row.values ? row.values[key] : null);
  const number = (key) => (row) => value(row, key) ?? -1;
  const columns = [
    { title: "name", text: (row) => row.name, sort: (row) => row.name, wide: true },
    { title: "differs in", text: (row) => row.kinds.join(", "), sort: (row) => row.kinds.join(), minor: true },
    { title: "max |A − B|", text: (row) => real(value(row, "max_abs")), sort: number("max_abs"), number: true },
    { title: "max relative", text: (row) => real(value(row, "max_rel")), sort: number("max_rel"), number: true, minor: true },
    {
      title: "elements",
      text: (row) => (row.values ? share(row.values.differing, row.values.count) : ""),
      sort: (row) => (row.values ? row.values.differing / row.values.count : -1),
      number: true,
      minor: true,
    },
  ];
  return lazyTable("Tensors that differ", columns, [...found.tensors], (row) => open(row.name), { inOrder: true }).node;
}

function names(title, found) {
  if (found.length === 0) return null;
  const shown = 200;
  const items = found.slice(0, shown).map((name) => element("li", {}, name));
  if (found.length > shown) items.push(element("li", { class: "dim" }, `and ${grouped(found.length - shown)} more`));
  return element("details", {}, element("summary", {}, `${title} (${grouped(found.length)})`), element("ul", {}, items));
}
