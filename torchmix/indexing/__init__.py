"""Files -> their catalog. Files in reading order:

file_changes.py    which files are known, new, changed, moved or gone
log_lines.py       what a run says of changed files, and of costly ones
progress_lines.py  progress as lines, for logs
measure_rows.py    rows that must be encoded -> their lengths
scan_files.py      files -> their shares of the catalog, many at once
property_files.py  properties of new files
deny_lists.py      deny-lists -> the rows that they name
wanted_rows.py     what a recipe says of rows -> properties and views
source_work.py     sources against the catalog before
scan_tasks.py      sources against the catalog -> the files to scan, also of one shard
part_checks.py     what is refused or said of a source's files
scan_shard.py      a shard of the files -> their parts, for a later run to publish
scan.py            sources -> their catalog
add_properties.py  a table of further properties
index.py           a recipe -> its catalog, for programs
"""
