"""Reports of judged runs: terminal, HTML, JUnit XML and Markdown, all from one summary.

For other packages:

* ``judge_run``: ``judge_and_report``, which judges a recorded run and writes its reports;
* ``summary``: ``RunSummary``, a judged run as plain data;
* ``terminal``: output for a terminal;
* ``compare``, ``trend``, ``trend_model``: two runs side by side, and many runs over time;
* ``beyond``: the reports of comparisons and trends;
* ``html``: ``report.html``, self-contained;
* ``markdown``: ``summary.md``, for pull requests and CI;
* ``chart_data``, ``charts``: the data of charts, and the charts;
* ``aa_result``, ``selftest_result``: data model of A/A and self-test results.

Within this package:

* ``causes``: findings by cause, the cards of ``report.html``;
* ``prompts``: every request as a row, for the table of all prompts and the lengths;
* ``timeline``: when engines were started and asked;
* ``plot``: static charts as SVG;
* ``junit``: ``junit.xml``;
* ``links``: find the newest self-test and A/A beside a run;
* ``write``: write all reports of a run.
"""
