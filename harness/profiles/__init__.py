"""What a user asks for: the profile, its models and their code, the cells of the matrix, the scenarios as data.

* ``cells``: ``CellName``, ``select_cells``, ``make_plan``: cells, and the engines that they share;
* ``engine_args``: ``check_arguments``, ``check_variables``: what a profile may pass to engines;
* ``hub``: ``Hub``: models in the local cache and on the Hugging Face hub;
* ``known_defects``: ``KnownDefect``, ``load_known``: the list of expected failures;
* ``model``: ``Profile``, ``load_profile``, ``read_profile``: profiles as validated data;
* ``model_reference``: ``ModelReference``, ``ModelFolder``, ``local_folder``: how a profile names a model;
* ``model_survey``: ``survey``: what cache and hub have of a profile's models;
* ``remote_code``: ``require_loadable``, ``require_trusted``: code that comes with a model;
* ``scenarios``: the scenarios of a profile;
* ``schema``: ``full_text``, ``profile_schema``: profiles as text, and their JSON schema.
"""
