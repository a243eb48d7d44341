"""Reports of judged runs: terminal, HTML, JUnit XML and Markdown, all from one summary.

For other packages:

* ``judge_run``: judge a recorded run and write its reports (``judge_and_report``);
* ``summary``: ``RunSummary``, a judged run as plain data;
* ``terminal``: output for a terminal;
* ``compare``, ``trend``, ``trend_model``: two runs side by side, and many runs over time;
* ``beyond``: the reports of these two;
* ``html``: ``report.html``, self-contained;
* ``markdown``: ``summary.md``, for pull requests and CI;
* ``chart_data``, ``charts``: the data of charts, and their Vega-Lite specifications;
* ``aa_result``, ``selftest_result``: data model of A/A and self-test results.

Used within this package:

* ``junit``: ``junit.xml``;
* ``links``: finds the newest self-test and A/A beside a run;
* ``write``: writes all reports of a run.
"""
