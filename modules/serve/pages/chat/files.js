// Text files that go with a message: chosen, dropped or pasted.

const MOST = 2e6; // characters of a file
let attached = []; // {name, text}

async function attach(files) {
  for (const file of files) {
    const text = file.size <= MOST ? await file.text() : "";
    if (file.size > MOST) toast(`${file.name} is too long: the most is 2 MB.`);
    else if (/\0|^%PDF-/.test(text) || text.split("\ufffd").length > 1 + text.length / 100) toast(`${file.name} is not a text file.`);
    else if (!text.trim()) toast(`${file.name} is empty.`);
    else attached.push({name: file.name, text: text.replace(/\r\n?/g, "\n")});
  }
  drawAttached();
  lookAhead();
  box.focus();
}

function drawAttached() {
  const field = $(".attached");
  field.hidden = !attached.length;
  field.replaceChildren(...attached.map((file, i) => {
    const chip = element("span", "chip", `${file.name} · ${file.text.length.toLocaleString("en")} characters`);
    const drop = button("×", () => { attached.splice(i, 1); drawAttached(); box.focus(); });
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
