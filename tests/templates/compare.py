#!/usr/bin/env python3
"""Compares `inspect template` with jinja2, set up as the transformers library does: published templates over conversations, and snippets.

usage: compare.py INSPECT FOLDER_WITH_TEMPLATES; prints a table, exits with 1 at a difference.
"""
import concurrent.futures, datetime, glob, json, os, subprocess, sys, tempfile
import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2024, 7, 26, 10)


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("run"), [], [], body).set_lineno(line)

    def run(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = NOW.strftime

tool={'type':'function','function':{'name':'get_w','description':'d "q" é','parameters':{'type':'object','properties':{'city':{'type':'string','description':'c'},'n':{'type':'integer'}},'required':['city']}}}
U=lambda c:{'role':'user','content':c}; A=lambda c,**k:dict({'role':'assistant','content':c},**k)
tc=[{'id':'call12345','type':'function','function':{'name':'get_w','arguments':{'city':'Zürich','n':2}}}]
convs=[([U('Hi')],None),([{'role':'system','content':'Be brief.'},U('Hi'),A('Hello  '),U('Bye <|im_end|>')],None),([U('w?'),A('',tool_calls=tc),{'role':'tool','content':'{"t": 1}','tool_call_id':'call12345','name':'get_w'}],[tool]),([U('w?'),A(None,tool_calls=tc),{'role':'tool','content':'r','tool_call_id':'call12345','name':'get_w'},A('done',reasoning_content='hmm'),U('x')],[tool]),([U([{'type':'text','text':'part ä'},{'type':'text','text':'two'}])],None),([U('a'),A('<think>\nt\n</think>\n\nb',reasoning_content='r'),U('')],None)]

VARIABLES = {'s':'Hällo wörld','l':[3,1,2],'d':{'b':1,'a':'x','items':5},'n':None,'f':2.5,'i':7,'ms':[{'role':'user','content':'hi','n':2},{'role':'assistant','content':'yo','n':1},{'role':'user','content':'','n':3}],'e':[]}


def by_jinja(source, variables):
    try:
        return env.from_string(source).render(**variables)
    except Exception:
        return None  # any error


def by_inspect(inspect, file, variables):
    run = subprocess.run([inspect, "template", "--file", file, "--now", NOW.isoformat()], input=json.dumps(variables).encode(), capture_output=True)
    if run.returncode not in (0, 1):
        sys.exit(f"{file}: inspect ended with {run.returncode}: {run.stderr.decode()}")
    return json.loads(run.stdout)["text"] if run.returncode == 0 else None


def main():
    inspect, folder = sys.argv[1:]
    files = sorted(glob.glob(os.path.join(folder, "*.jinja")))
    if not files:
        sys.exit(f"no templates in {folder}")
    total = refused = wrong = 0
    cases = []
    for file in files:
        for i, (messages, tools) in enumerate(convs):
            for add in (False, True):
                cases.append((file, {"messages": messages, "tools": tools, "add_generation_prompt": add, "bos_token": "<s>", "eos_token": "</s>", "enable_thinking": i % 2 == 1}))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        here = list(pool.map(lambda case: by_inspect(inspect, *case), cases))
    differ = dict.fromkeys(files, 0)
    for (file, variables), got in zip(cases, here):
        expected = by_jinja(open(file, encoding="utf-8").read(), variables)
        total, refused, wrong = total + 1, refused + (expected is None), wrong + (got != expected)
        differ[file] += got != expected
    for file, n in differ.items():
        print(f"{os.path.basename(file):60} {f'{n} differ' if n else 'equal'}")
    snippets = open(os.path.join(os.path.dirname(__file__), "snippets.txt"), encoding="utf-8").read().splitlines()
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", encoding="utf-8") as file:
        for snippet in snippets:
            file.seek(0)
            file.truncate()
            file.write(snippet)
            file.flush()
            expected, got = by_jinja(snippet, VARIABLES), by_inspect(inspect, file.name, VARIABLES)
            if got != expected:
                wrong += 1
                print(f"snippet {snippet!r}: jinja2 {expected!r}, here {got!r}")
    print(f"{len(files)} templates, {total} renderings ({refused} refused by both), {len(snippets)} snippets: {wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
