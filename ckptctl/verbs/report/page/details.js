// All that is known of one tensor, in a dialog; the address of the page names it.

function detailsOf(report) {
  const dialog = document.getElementById("details");
  const tensors = new Map(report.tensors.map((tensor) => [tensor.name, tensor]));
  const differences = new Map((report.difference ? report.difference.tensors : []).map((one) => [one.name, one]));

  function open(name) {
    const tensor = tensors.get(name);
    const difference = differences.get(name);
    const heading = element("h2", { id: "details-name", tabindex: "-1" }, name);
    const close = element("button", { class: "close", "aria-label": "Close", click: () => dialog.close() }, "×");
    const parts = [element("div", { class: "bar" }, heading, close)];
    if (tensor) parts.push(...tensorParts(tensor, report));
    else parts.push(...unlisted(name, report));
    if (difference) parts.push(element("h3", {}, `Compared with ${report.other}`), differenceFacts(difference));
    dialog.replaceChildren(...parts);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
    heading.focus();
    history.replaceState(null, "", `#tensor=${encodeURIComponent(name)}`);
  }

  dialog.addEventListener("close", () => history.replaceState(null, "", "#"));
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  return open;
}

function tensorParts(tensor, report) {
  const facts = [
    ["dtype", tensor.dtype],
    ["shape", shape(tensor.shape)],
    ["bytes", both(tensor.bytes, bytes)],
  ];
  if (tensor.alias_of !== null) facts.push(["shares memory with", tensor.alias_of]);
  if (tensor.unsupported !== null) facts.push(["cannot be read", prose(tensor.unsupported)]);
  const parts = [factList(facts)];
  const wrong = report.findings.filter((finding) => finding.tensor === tensor.name);
  if (wrong.length > 0) parts.push(findingList(wrong, report.files, () => null));
  parts.push(element("h3", {}, "Location"), chunkMap(tensor, report.files));
  if (tensor.stats) parts.push(element("h3", {}, "Values"), valuesOf(tensor.stats, tensor.dtype));
  return parts;
}

function unlisted(name, report) {
  const wrong = report.findings.filter((finding) => finding.tensor === name);
  if (wrong.length === 0) return [element("p", {}, "This tensor is not listed on this page.")];
  return [findingList(wrong, report.files, () => null)];
}

function differenceFacts(one) {
  const facts = [["differs in", one.kinds.join(", ")]];
  if (one.sources.some((name) => name !== one.name)) facts.push(["name in B", one.sources.join(", ")]);
  if (one.kinds.includes("shape")) facts.push(["shape", `${shape(one.shape_a)} in A, ${shape(one.shape_b)} in B`]);
  if (one.kinds.includes("dtype")) facts.push(["dtype", `${one.dtype_a} in A, ${one.dtype_b} in B`]);
  const values = one.values;
  if (values) {
    facts.push(
      ["largest difference", real(values.max_abs) || "unknown"],
      ["largest relative difference", real(values.max_rel) || "unknown"],
      ["index of the largest difference", values.worst ? shape(values.worst) : "unknown"],
      ["elements that differ", `${grouped(values.differing)} of ${grouped(values.count)} (${share(values.differing, values.count)})`],
      ["NaN or infinite", grouped(values.nonfinite)],
    );
  }
  return factList(facts);
}
