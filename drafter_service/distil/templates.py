"""The words of the built-in prompts: subjects, and templates over them, in eight classes.

A template's `{slot}` takes one of the slot's subjects; alternatives are separated by bars. The
first classes take the subjects listed here, the second ones words of the target's vocabulary
(`{word}`). Data only; `prompts` puts it together.
"""

#: Slot -> its subjects.
SLOTS = {
    "topic": (
        "photosynthesis|black holes|the French Revolution|compound interest|volcanoes|vaccines|"
        "the water cycle|machine learning|democracy|the Roman Empire|electric cars|honey bees|"
        "climate change|the stock market|DNA|gravity|coffee|jazz music|chess|the human heart|"
        "recycling|the internet|solar panels|Shakespeare|earthquakes|the immune system|inflation|"
        "ancient Egypt|sleep|bicycles|the moon landing|whales|public speaking|time management|"
        "nutrition|yoga|impressionist painting|evolution|magnets|the printing press|rainforests|"
        "coral reefs|batteries|supply and demand|the periodic table|bridges|dinosaurs|tea|"
        "world trade|computer networks|encryption|databases|operating systems|probability|"
        "mental health|gardening|airplanes|glaciers|the brain|antibiotics|urban planning|"
        "renewable energy|the Silk Road|pottery|photography|taxes|the nervous system|tides|"
        "neural networks|the Great Depression|opera|deserts|spiders|nuclear power|cheese"
    ),
    "person": (
        "a young baker|a shepherd|a curious girl|a lonely robot|a retired detective|"
        "two brothers|a nervous wizard|a brave mouse|a talented violinist|a tired nurse|"
        "a fisherman|a clever fox|a lost astronaut|a shy librarian|a farmer's daughter|"
        "a famous chess player|"
        "a street musician|a kind giant|a mountain guide|a clumsy knight|a new teacher|"
        "a sea captain"
    ),
    "place": (
        "a small village|the edge of a forest|a busy city|an abandoned castle|a desert town|Mars|"
        "a snowy mountain|a quiet library|an island|a train station|a magical garden|the deep sea|"
        "an old theatre|a space station|a market in Morocco|a rainy harbour|a school|Paris|Tokyo"
    ),
    "thing": (
        "a secret door|a broken clock|a letter from the past|a strange map|a talking cat|a dragon|"
        "an old photograph|a golden key|a stray dog|a mysterious light|a hidden treasure|a storm|"
        "a magic book|an unexpected visitor|a forgotten song|a paper boat|a lost ring|a new friend"
    ),
    "activity": (
        "learning a new language|running a marathon|cooking for a family|saving money|moving house|"
        "preparing for a job interview|starting a small business|writing a book|travelling alone|"
        "studying for exams|growing vegetables|making friends in a new city|working from home|"
        "reading more books|losing weight|buying a used car|planning a wedding|training a puppy|"
        "getting better sleep|managing stress|giving a presentation|organising a birthday party|"
        "painting a room|learning to swim|camping with children|choosing a laptop|"
        "building a website"
    ),
    "item": (
        "healthy breakfasts|countries to visit|classic novels|team games|board games|useful apps|"
        "pets for small flats|names for a cat|science projects|cheap dinners|birthday presents|"
        "indoor plants|hobbies for winter|musical instruments|famous scientists|history podcasts|"
        "renewable energy sources|programming languages|farm animals|types of clouds|vegetables|"
        "museums in Europe|questions for an interview|slogans for a coffee shop|healthy snacks|"
        "ways to save water|exercises for the back|Italian dishes|inventions|rivers|sports"
    ),
    "code": (
        "reverses a string|checks whether a number is prime|computes the factorial of n|"
        "sorts a list|"
        "finds the largest number in a list|counts the vowels in a string|merges two sorted lists|"
        "removes duplicates from a list|prints a multiplication table|checks for a palindrome|"
        "converts Celsius to Fahrenheit|counts how often each word occurs|reads a CSV file|"
        "finds the common elements of two lists|flattens a nested list|generates a random password|"
        "computes the greatest common divisor|searches a sorted list with binary search|"
        "validates an email address|rotates a list by k places|transposes a matrix|"
        "computes the average of a list|implements a stack|implements a queue|adds two matrices|"
        "finds the second largest number|capitalises every word|converts a number to binary|"
        "sums the digits of a number|checks whether two strings are anagrams|computes a power"
    ),
    "language": "Python|Python|Python|Python|JavaScript|Java|C|C++|Go|SQL or Python|Rust|Ruby",
    "pair": (
        "cats and dogs|trains and planes|the sun and the moon|books and films|tea and coffee|"
        "mitosis and meiosis|weather and climate|bees and wasps|lists and tuples in Python|"
        "TCP and UDP|speed and velocity|saving and investing|HTML and CSS|plants and animals|"
        "novels and short stories|renewable and fossil energy|a virus and a worm|stars and planets|"
        "the city and the countryside|RAM and a hard disk|stocks and bonds|frogs and toads"
    ),
    "audience": "a child|a beginner|a high school student|my grandmother|a colleague|an expert",
    "number": "three|four|five|five|six|seven|ten|ten",
    "tone": "short|funny|sad|formal|friendly|detailed|simple|dramatic|cheerful",
    "draft": (
        "The meeting was long and nobody knew why we was there, but the coffee were good.|"
        "I am write to you because the order I make last week have not arrive yet.|"
        "Our shop opened in 1987. It sells shoes and bags. Many customers come on Saturdays.|"
        "The river rose quickly after the rain, and the people in the valley moved to the hills.|"
        "Scientists found that bees can count to four, which helps them remember landmarks.|"
        "We are happy to announce that the new library will open in May with free workshops.|"
        "My brother don't like vegetables, but he eat carrots when they is cooked with butter.|"
        "The company lost money for two years, then sold its factory and began to grow again.|"
        "Electric buses are quieter than diesel ones, cost more to buy and less to run.|"
        "Last summer we walked along the coast for nine days and slept in a small tent.|"
        "The experiment failed because the sensor was too hot, so the team built a cooler.|"
        "Please send me the report as soon as possible, my boss is waiting for it."
    ),
    "question": (
        "Why is the sea salty?|How do airplanes fly?|What is the capital of Australia?|"
        "How many continents are there?|Why do leaves change colour?|What is a healthy diet?|"
        "Who invented the telephone?|What causes thunder?|How does a microwave oven work?|"
        "Why do we dream?|What is the largest ocean?|How do I make pancakes?|What is inflation?|"
        "How do vaccines work?|What should I cook tonight?|How do I tie a tie?|What is 17 times 6?|"
        "Can you recommend a good film?|Why is exercise important?|How do computers store data?|"
        "What is the meaning of life?|How do I remove a coffee stain?|What is an atom?|"
        "How can I improve my English?|What does a product manager do?|Is it safe to drink rain?"
    ),
}

#: Class -> its templates.
CLASSES = {
    "chat": (
        "{question}|{question} Please explain it to {audience}.|Give me advice on {activity}.|"
        "I am {activity} for the first time. What should I know?|"
        "Hi! Can you help me with {activity}?|"
        "{question} Answer in one paragraph.|I need motivation for {activity}.|"
        "What do you think about {topic}?|Tell me an interesting fact about {topic}.|"
        "What are the most common mistakes when {activity}?|{question} And why does it matter?"
    ),
    "explanation": (
        "Explain {topic} to {audience}.|How does {topic} work?|Why is {topic} important?|"
        "Describe the history of {topic}.|What is {topic}?|Write a {tone} introduction to {topic}.|"
        "Explain the basics of {topic} in simple words.|What are the benefits of {topic}?|"
        "Write an essay about {topic}.|Give an overview of {topic} for {audience}.|"
        "What problems are connected with {topic}?|How has {topic} changed the world?"
    ),
    "story": (
        "Write a {tone} story about {person} and {thing}.|Tell me a story set in {place}.|"
        "Write a story about {person} in {place}.|Once upon a time, {person} found {thing}. Go on.|"
        "Write the first paragraph of a novel about {person} who lives in {place}.|"
        "Tell a bedtime story about {person}, {place} and {thing}.|"
        "Write a {tone} scene in which {person} meets {person}.|Describe {place} at night.|"
        "Write a dialogue between {person} and {person}."
    ),
    "list": (
        "List {number} {item}.|Give me {number} ideas for {item}.|"
        "Name {number} {item} and say why.|"
        "Make a list of {number} tips for {activity}.|What are the {number} best {item}?|"
        "Give {number} facts about {topic}.|Write a checklist for {activity}.|"
        "List the advantages and disadvantages of {topic}.|Suggest {number} books about {topic}.|"
        "Give me a plan for {activity} in {number} steps.|What do I need for {activity}?"
    ),
    "code": (
        "Write a {language} function that {code}.|Write a program in {language} that {code}.|"
        "Show me {language} code that {code} and explain it.|How do I write code that {code}?|"
        "Write a {language} class with a method that {code}.|"
        "Write a {language} function that {code}, with comments and an example.|"
        "Write unit tests for a {language} function that {code}."
    ),
    "comparison": (
        "Compare {pair}.|What is the difference between {pair}?|Which is better: {pair}?|"
        "Explain the difference between {pair} to {audience}.|What do {pair} have in common?|"
        "Write a table that compares {pair}.|Write a {tone} paragraph about {pair}."
    ),
    "editing": (
        "Correct the grammar: {draft}|Summarise in one sentence: {draft}|"
        "Make this more formal: {draft}|"
        "Rewrite this so that {audience} understands it: {draft}|Continue this text: {draft}|"
        "Turn this into a {tone} email: {draft}|Write a headline for this: {draft}|"
        "Translate this into plain words, then explain it: {draft}"
    ),
    "writing": (
        "Write a {tone} email about {activity}.|Write a {tone} poem about {topic}.|"
        "Write a {tone} letter to {person}.|Write a product description for {thing}.|"
        "Write a blog post about {activity}.|Write a {tone} speech about {topic}.|"
        "Write a review of a book about {topic}.|Write a {tone} advertisement for {item}.|"
        "Write instructions for {activity}.|Write a diary entry of {person} in {place}."
    ),
}

#: Over words of the target's own vocabulary, which reach further than any list of subjects.
WORD_CLASSES = {
    "chat": (
        "What is {word}?|What do you know about {word}?|Do you like {word}?|Tell me about {word}.|"
        "I have a question about {word} and {word}. Can you help me?|What does {word} mean?|"
        "My friend talks about {word} all day. What should I say?|Give me advice about {word}."
    ),
    "explanation": (
        "Explain {word} to {audience}.|How does {word} work?|Why is {word} important?|"
        "What is the connection between {word} and {word}?|Write a short text about {word}.|"
        "What happens when {word} meets {word}?|Describe the history of {word}."
    ),
    "story": (
        "Write a {tone} story about {word} and {word}.|Tell a story about {person} and the {word}.|"
        "Write a story that begins with the word {word}.|Write a fairy tale about the {word}.|"
        "Write a {tone} story with the words {word}, {word} and {word}.|"
        "Tell me a story about the {word} in {place}."
    ),
    "list": (
        "List {number} facts about {word}.|Give me {number} words that go with {word}.|"
        "Give me {number} ideas for {word}.|Name {number} kinds of {word}.|List uses of {word}.|"
        "What are the {number} most important things about {word}?|Make a list about {word}."
    ),
    "code": (
        "Write a {language} class for {word} with {word} and {word}.|"
        "Write a {language} function that sorts a list of {word} by {word}.|"
        "Write {language} code that counts the {word} entries in a file.|"
        "Write a {language} function that takes {word} and returns {word}.|"
        "Write a {language} function that {code}.|How do I represent {word} in {language}?"
    ),
    "comparison": (
        "Compare {word} and {word}.|What is the difference between {word} and {word}?|"
        "Which is better, {word} or {word}?|What do {word} and {word} have in common?"
    ),
    "editing": (
        "Write a sentence with the words {word}, {word} and {word}.|"
        "Continue: The {word} was {word},|"
        "Rewrite this in a {tone} way: The {word} is near the {word}.|Define {word} and {word}.|"
        "Write a headline about {word} and an article that fits it."
    ),
    "writing": (
        "Write a {tone} poem about {word}.|Write a {tone} email about {word}.|"
        "Write a letter to {person} about {word}.|Write a {tone} speech about {word}.|"
        "Write a blog post about {word} and {word}.|Write instructions for {word}."
    ),
}
