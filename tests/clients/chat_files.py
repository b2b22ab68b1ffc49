"""Claims about the page of the chat, for pages.py: the text of PDF files, made here or printed by the browser."""
import base64
import json
import zlib

from page_tools import check, clean, presentable
from chat_tools import SCRIPTED, exchange, reload


def pdf(objects, trailer="/Root 1 0 R", head="%PDF-1.7\n"):
    """A file of these objects: {number: text, or (dictionary, bytes of the stream)}. Without a table of references, which nobody reads."""
    out = head.encode()
    for number, value in objects.items():
        if isinstance(value, tuple):
            body, data = value
            value = b"<<%s /Length %d>>\nstream\n%s\nendstream" % (body.encode(), len(data), data)
        else:
            value = value.encode("latin-1")
        out += b"%d 0 obj\n%s\nendobj\n" % (number, value)
    return out + f"trailer\n<<{trailer}>>\n%%EOF\n".encode()


def page_of(contents, fonts="/F 4 0 R", more=None, filters="", rest=""):
    return {1: "<</Type /Catalog /Pages 2 0 R>>", 2: f"<</Type /Pages /Kids [3 0 R] /Count 1 /Resources <</Font <<{fonts}>> {rest}>>>>",
            3: "<</Type /Page /Parent 2 0 R /Contents 5 0 R>>", 4: "<</Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding>>",
            5: (filters, contents), **(more or {})}


PLAIN = (rb"BT /F 12 Tf 72 700 Td (The first line) Tj 0 -14 Td (has \(brackets\), \344\366\374 and) Tj 14 TL T* [(ker)20(ned) -300 (words)] TJ "
         rb"0 -40 Td <412070617261677261706820> Tj (of hex.) Tj ET")
PLAIN_SAYS = "The first line\nhas (brackets), äöü and\nkerned words\n\nA paragraph of hex."

# A PDF with objects in a stream, a font whose letters have a map in place of names, and a font with the names of glyphs.
PACKED = ["<</Type /Catalog /Pages 12 0 R>>", "<</Type /Pages /Kids [13 0 R 16 0 R] /Count 2>>",
          "<</Type /Page /Parent 12 0 R /Contents [20 0 R 21 0 R] /Resources <</Font <</A 14 0 R /B 15 0 R>>>>>>",
          "<</Type /Font /Subtype /Type0 /Encoding /Identity-H /DescendantFonts [<</Type /Font /DW 500 /W [1 [600 600] 3 9 500]>>] /ToUnicode 22 0 R>>",
          "<</Type /Font /Subtype /Type1 /FirstChar 1 /Widths [500 500 500 500] /Encoding <</Differences [1 /fi /eacute /quoteright /uni20AC]>>>>",
          "<</Type /Page /Parent 12 0 R /Contents 23 0 R /Resources <</Font <</B 15 0 R>> /XObject <</X 24 0 R>>>>>>"]
CMAP = b"1 begincodespacerange <0000> <ffff> endcodespacerange 2 beginbfrange <0001> <0003> <0041> <0004> <0005> [<00660066> <D83DDE00>] endbfrange 1 beginbfchar <0006> <4E2D> endbfchar"


def packed_file():
    texts, heads, at = [], [], 0
    for number, text in enumerate(PACKED, 11):
        heads.append(f"{number} {at}")
        texts.append(text)
        at += len(text) + 1
    head = " ".join(heads) + "\n"
    stream = zlib.compress((head + "\n".join(texts)).encode())
    deflate = "/Filter /FlateDecode"
    return pdf({30: (f"/Type /ObjStm /N {len(texts)} /First {len(head)} {deflate}", stream),
                20: (deflate, zlib.compress(b"BT /A 10 Tf 1 0 0 1 50 500 Tm <000100020003> Tj 12 0 Td <00040005")),
                21: ("/Filter [/ASCII85Decode /FlateDecode]", base64.a85encode(zlib.compress(b"0006> Tj ET BT /B 10 Tf 50 480 Td <0102> Tj <0304> Tj ET")) + b"~>"),
                22: (deflate, zlib.compress(CMAP)), 23: ("", b"q 1 0 0 -1 0 800 cm /X Do Q"),
                24: ("/Type /XObject /Subtype /Form", b"BT /B 10 Tf 1 0 0 -1 10 20 Tm (In a form) Tj ET")}, trailer="/Root 11 0 R")


PACKED_SAYS = "ABCff😀中\n\nfié’€\n\nIn a form"

LOOP = {24: ("/Type /XObject /Subtype /Form /Resources <</XObject <</X 24 0 R>>>>", b"/X Do " * 50)}
BAD = {
    "garbage": (b"%PDF-1.7\n" + bytes(range(256)) * 40, "is no PDF file that can be read"),
    "brackets": (b"%PDF-1.7\n1 0 obj " + b"[" * 100000 + b"<<" * 100000 + b"(" * 100000, "is no PDF file that can be read"),
    "no text": (pdf(page_of(b"0 0 100 100 re f")), "has no text: its pages are pictures, or empty"),
    "encrypted": (pdf(page_of(PLAIN), trailer="/Root 1 0 R /Encrypt <</Filter /Standard>>"), "is encrypted: its text cannot be read"),
    "unnamed letters": (pdf(page_of(b"BT /F 12 Tf <000100020003> Tj ET", more={4: "<</Type /Font /Subtype /Type0 /Encoding /Identity-H>>"})), "does not say which letters its fonts draw"),
    "pages in a circle": (pdf({1: "<</Type /Catalog /Pages 2 0 R>>", 2: "<</Type /Pages /Kids [2 0 R 3 0 R]>>", 3: "<</Type /Pages /Kids 2 0 R>>"}), "is no PDF file that can be read"),
    "a bomb": (pdf(page_of(zlib.compress(bytes(140_000_000)), filters="/Filter /FlateDecode")), "is too large when it is unpacked"),
}


def attach(page, name, data):
    page.run(f"""(async () => {{ attached = []; document.querySelector('.toast').hidden = true;
        await attach([new File([Uint8Array.from(atob({json.dumps(base64.b64encode(data).decode())}), c => c.charCodeAt(0))], {json.dumps(name)})]); }})()""")


def text_of(page, data):
    attach(page, "a.pdf", data)
    return page.run("attached[0]?.text")


PRINTED = """<h1>The title of it</h1><p>A paragraph with <b>bold</b> and <i>slanted</i> words, ﬁne ligatures – äöüß – and a price of 5 €.</p>
<ul><li>first item</li><li>second item</li></ul><table><tr><td>left</td><td style="padding-left: 80px">right</td></tr></table>
<p style="page-break-before: always">On another page.</p>"""


def a_pdf_becomes_text(browser, server):
    page = browser.page()
    page.call("Page.addScriptToEvaluateOnNewDocument", source=SCRIPTED)
    other = browser.page()
    other.go("data:text/html;charset=utf-8;base64," + base64.b64encode(PRINTED.encode()).decode())
    printed = base64.b64decode(other.call("Page.printToPDF")["data"])
    page.call("Page.bringToFront")
    reload(page, server)
    for what, data, says in (("a plain file", pdf(page_of(PLAIN)), PLAIN_SAYS), ("a packed file", packed_file(), PACKED_SAYS)):
        check(text_of(page, data) == says, what, "says", repr(page.run("attached[0]?.text")), page.run("document.querySelector('.toast').innerText"))
    said = text_of(page, printed)
    for line in ("The title of it", "price of 5 €.", "first item", "second item", "left right", "On another page."):
        check(line in said, repr(line), "is not in", repr(said))
    check("bold and slanted words, fine ligatures – äöüß – and" in " ".join(said.split()), said)
    # An unreadable file gets one sentence within seconds.
    for what, (data, sentence) in BAD.items():
        attach(page, "x.pdf", data)
        told = page.run("document.querySelector('.toast').innerText")
        check(told == f"x.pdf {sentence}." and page.run("attached.length") == 0, what, "is told as", repr(told))
    # One that only draws itself again ends, whatever it says; a picture among the operators is none of them.
    begun = page.run("performance.now()")
    text_of(page, pdf(page_of(b"BT /F 12 Tf (Once) Tj ET /X Do", more=LOOP, rest="/XObject <</X 24 0 R>>")))
    check(page.run("performance.now()") - begun < 10000, "a form that draws itself")
    check(text_of(page, pdf(page_of(b"BI /W 1 /H 1 ID (((\xff EI BT /F 12 Tf (Behind) Tj ET"))) == "Behind", "a picture hides the text")
    # A PDF goes with a message as other files do, dropped or chosen.
    page.run(f"""(() => {{ attached = []; const data = new DataTransfer(), bytes = Uint8Array.from(atob({json.dumps(base64.b64encode(pdf(page_of(PLAIN))).decode())}), c => c.charCodeAt(0));
        data.items.add(new File([bytes], 'notes.pdf'));
        document.body.dispatchEvent(new DragEvent('drop', {{bubbles: true, cancelable: true, dataTransfer: data}})); }})()""")
    page.until("attached.length")
    presentable(page, "pdf", "a PDF")
    exchange(page, "What is it?", [["content", "Notes."]], "stop", 10)
    check(page.run("asked.at(-1).messages[0].content") == f"notes.pdf:\n```\n{PLAIN_SAYS}\n```\n\nWhat is it?", page.run("asked.at(-1).messages"))
    clean(page, server, "a PDF")


TESTS = [a_pdf_becomes_text]
