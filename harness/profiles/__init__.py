"""What a user asks for: the profile, its models and their code, the cells of the matrix, the scenarios as data."""
