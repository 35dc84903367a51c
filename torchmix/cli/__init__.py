"""The command line. In reading order:

terminal.py            what every verb takes and prints: counts, tables for people, JSON for programs, progress, pages
                       of HTML, and the exit code
streams.py             Selections, groups and deny-lists as rows of the tables that verbs print
run.py                 the options by which a verb knows a run: its layout, its log of decisions, its state and history
index.py               `torchmix index`: build the catalog, or bring it up to date
query.py               `torchmix query`: SQL over the properties of a recipe's rows
properties.py          `torchmix properties add`: join a table of further properties to the rows of a source
profile.py             `torchmix profile RECIPE`: measure what each source costs a loader
keys.py                `torchmix keys`: make the keys of loaders and of their clients
serve.py               `torchmix serve`: loaders of a recipe, for the trainers of a job or of several
diff.py                `torchmix diff`: what an edit of a recipe does to a run, and the code that accepts it
calibrate.py           `torchmix calibrate`: the cost of a sample from timings of one's own
reframe.py             `torchmix reframe`: write a compressed file of lines again, in frames that can be read one by
                       one
second_interpreter.py  a second interpreter plans a step again, to find strategies whose answer depends on the history
                       of their process
findings.py            what is wrong, or worth knowing, before a run starts: all findings of `torchmix check`
init/                  torchmix init
plan/                  torchmix plan
tune.py                `torchmix tune`: which placement makes the steps of a recipe fastest
check.py               `torchmix check`: will this recipe train as it says?
show.py                `torchmix show`: the text or the tokens of what training will see, for a terminal or as a page
                       of HTML
trace.py               `torchmix trace`: in which steps a document was, or will be; and every document of a step
top.py                 `torchmix top`: this user's runs on this machine, as they are now
report/                torchmix report
doctor.py              `torchmix doctor`: whether the native library is used; what dead runs have left, and with
                       --clean its removal
main.py                the command line: `torchmix check | index | plan | query | show RECIPE`, and verbs with
                       arguments of their own
start.py               the program `torchmix`, whose imports take half a second, and longer from a cold disk: Ctrl-C
                       may come meanwhile
"""
