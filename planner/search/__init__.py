"""What `profile` is made of: candidates, what each head gets of them on a prompt, and the means over prompts."""
