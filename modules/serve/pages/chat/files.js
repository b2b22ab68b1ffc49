// Files that go with a message, as their text: chosen, dropped or pasted.

const MOST = 2e6; // characters of a file
let attached = []; // {name, text}

async function attach(files) {
  for (const file of files) {
    if (/^%PDF-/.test(bytesAsText(new Uint8Array(await file.slice(0, 5).arrayBuffer())))) { await attachPdf(file); continue; }
    if (file.type.startsWith("image/")) { toast(`${file.name} is a picture: the models here read text alone.`); continue; }
    const text = file.size <= MOST ? await file.text() : "";
    if (file.size > MOST) toast(`${file.name} is too long: the most is 2 MB.`);
    else if (text.includes("\0") || text.split("\ufffd").length > 1 + text.length / 100) toast(`${file.name} is not a text file.`);
    else if (!text.trim()) toast(`${file.name} is empty.`);
    else attached.push({name: file.name, text: text.replace(/\r\n?/g, "\n")});
  }
  drawAttached();
  lookAhead();
  draftChanged();
  box.focus();
}

async function attachPdf(file) {
  if (file.size > PDF_MOST) return toast(`${file.name} is too long: the most is ${PDF_MOST / 1e6} MB.`);
  const {text, read, pages, fault} = await textOfPdf(new Uint8Array(await file.arrayBuffer()));
  if (fault) return toast(`${file.name} ${fault}.`);
  if (read < pages || text.length > MOST) toast(`${file.name} is long: only its first ${read} of ${pages} pages are read.`);
  attached.push({name: file.name, text: text.slice(0, MOST)});
}

function drawAttached() {
  const field = $(".attached");
  field.hidden = !attached.length;
  field.replaceChildren(...attached.map((file, i) => {
    const chip = element("span", "chip", `${file.name} · ${file.text.length.toLocaleString("en")} characters`);
    const drop = button("×", () => { attached.splice(i, 1); drawAttached(); draftChanged(); box.focus(); });
    drop.ariaLabel = `Leave ${file.name} out`;
    chip.append(drop);
    return chip;
  }));
  showState();
}

const picker = $(".attach input");
picker.onchange = async () => { await attach([...picker.files]); picker.value = ""; };
addEventListener("dragover", e => { if (e.dataTransfer.types.includes("Files")) { e.preventDefault(); document.body.classList.add("drops"); } });
addEventListener("dragleave", e => { if (!e.relatedTarget) document.body.classList.remove("drops"); });
addEventListener("drop", e => {
  document.body.classList.remove("drops");
  if (!e.dataTransfer.files.length) return;
  e.preventDefault();
  const files = [...e.dataTransfer.files];
  if (files.length === 1 && /\.json$/.test(files[0].name)) files[0].text().then(text => /^\s*\{\s*"quire"\s*:\s*"conversations"/.test(text) ? importChats(text) : attach(files));
  else attach(files);
});
box.addEventListener("paste", e => { if (e.clipboardData.files.length) { e.preventDefault(); attach([...e.clipboardData.files]); } });
