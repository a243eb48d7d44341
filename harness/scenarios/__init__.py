"""States beyond cold prompts: as data in the profile, as scripts of requests, and as proof that they occurred."""
