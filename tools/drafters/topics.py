"""What questions are about, by kind: each kind has forms of its own in ``questions``."""

from __future__ import annotations

THINGS = """a compass|a telescope|a microwave oven|a pendulum clock|a sewing machine|a solar panel|a wind turbine|an
umbrella|a zipper|a ballpoint pen|a violin|a grand piano|a drum kit|a flute|a lighthouse|a suspension bridge|an
elevator|a submarine|a hot air balloon|a steam engine|a diesel engine|an electric car|a skateboard|a sailing boat|a
tractor|a thermometer|a barometer|a stethoscope|an X-ray machine|a hearing aid|a pair of glasses|a camera lens|a light
bulb|a candle|a fireplace|a chimney|a vacuum cleaner|a dishwasher|a washing machine|a toaster|a pressure cooker|a cast
iron pan|a wok|a chef's knife|a corkscrew|a tea pot|a thermos flask|a backpack|a sleeping bag|a tent|a pair of hiking
boots|a raincoat|a wool sweater|a silk scarf|a necktie|a wristwatch|a gold ring|a pearl|a diamond|a magnet|a battery|a
transformer|a fuse|a door lock|a padlock|a safe|a mailbox|a passport photo|a printed book|a newspaper|a globe|a world
map|a calendar|a calculator|an abacus|a slide rule|a chess board|a deck of cards|a crossword puzzle|a jigsaw puzzle|a
kite|a yo-yo|a teddy bear|a swing|a tree house|a garden hose|a wheelbarrow|a shovel|a hammer|a screwdriver|a power
drill|a ladder|a paint brush|a brick|concrete|glass|rubber|plastic|stainless steel|paper|leather|cotton|bamboo|cork|
charcoal|soap|toothpaste|perfume|wax|ink|glue|a mirror|a stained glass window|a water tower|a dam|a canal|a traffic
light|a roundabout|a subway train|a cable car|a parachute|a satellite|a space suit|a rocket"""

ACTIVITIES = """knit a scarf|learn to juggle|play the guitar|paint a watercolour|train for a marathon|ride a horse|
build a bird house|write a diary|keep a budget|plan a wedding|organise a book club|start a blog|record a podcast|take
better photographs|learn chess openings|solve a Rubik's cube|brew coffee at home|make cheese|ferment cabbage|cook rice|
roast a chicken|sharpen a knife|grow tomatoes|prune roses|make compost|keep bees|raise chickens|train a puppy|clean an
aquarium|groom a cat|fix a leaking tap|paint a room|hang a picture|lay floor tiles|assemble furniture|sew a button|iron
a shirt|polish shoes|wash a wool sweater|declutter a closet|clean an oven|unclog a drain|insulate an attic|save water
at home|read faster|memorise a speech|prepare for a debate|give a presentation|write a cover letter|negotiate a salary|
ask for feedback|lead a meeting|manage a small team|deal with a difficult customer|set goals for the year|wake up
early|meditate|stretch before a run|lift weights safely|improve my posture|do a push-up|practise yoga|climb a wall|ski
downhill|surf a wave|row a boat|throw a frisbee|play table tennis|serve in tennis|bowl a strike|dance salsa|sing in a
choir|act on a stage|write a song|compose a melody|draw a portrait|carve wood|fold a paper crane|make a candle|bind a
book|restore an old chair|collect stamps|watch birds|identify mushrooms|read a map|use a compass|light a campfire|pitch
a tent|cross a river|pack a suitcase|find cheap flights|travel with a baby|learn sign language|teach a child to read|
help a shy student|study for a chemistry test|write an essay|cite a source|take notes in a lecture|choose a university|
apply for a scholarship|rent a flat|buy a used car|sell old clothes|open a bank account|read a contract|write a will|
vote in an election|volunteer at a shelter|donate blood|host a dinner party|make new friends|apologise to a friend|
comfort someone who is sad|stop procrastinating|break a bad habit|quit smoking|drink less sugar|cut down on screen
time|protect my password|back up my files|clean a laptop|set up a printer|edit a video|design a logo|build a website|
learn to type"""

PLACES = """Tokyo|Cairo|Rio de Janeiro|Istanbul|New York|London|Rome|Berlin|Madrid|Lisbon|Vienna|Prague|Athens|
Stockholm|Oslo|Helsinki|Dublin|Edinburgh|Amsterdam|Brussels|Moscow|Beijing|Shanghai|Seoul|Bangkok|Singapore|Jakarta|
Mumbai|Delhi|Nairobi|Cape Town|Lagos|Marrakesh|Mexico City|Havana|Lima|Buenos Aires|Santiago|Toronto|Vancouver|Chicago|
San Francisco|Los Angeles|New Orleans|Hawaii|Alaska|Iceland|Greenland|Norway|Switzerland|Portugal|Greece|Turkey|Egypt|
Kenya|Madagascar|India|Nepal|Japan|Vietnam|New Zealand|Brazil|Peru|Chile|Canada|the Sahara|the Amazon rainforest|the
Nile|the Himalayas|the Alps|the Grand Canyon|the Great Barrier Reef|Antarctica|the Dead Sea|the Mediterranean Sea|Lake
Victoria|Niagara Falls|Mount Everest|Machu Picchu|the Great Wall of China|the Taj Mahal|the Colosseum|Stonehenge|the
Panama Canal|Venice|Barcelona|Kyoto|Budapest|Warsaw|Copenhagen"""

ANIMALS = """elephants|giraffes|lions|tigers|wolves|brown bears|polar bears|pandas|kangaroos|koalas|gorillas|
chimpanzees|bats|hedgehogs|squirrels|beavers|otters|dolphins|blue whales|sharks|octopuses|jellyfish|sea turtles|
crocodiles|snakes|chameleons|frogs|salamanders|penguins|ostriches|eagles|owls|parrots|hummingbirds|crows|pigeons|
storks|ants|butterflies|spiders|fireflies|mosquitoes|dragonflies|snails|earthworms|horses|cows|sheep|goats|pigs|
rabbits|guinea pigs|hamsters|goldfish|salmon|eels|seahorses|starfish|crabs|dinosaurs|mammoths"""

FOODS = """sourdough bread|chocolate cake|apple pie|tomato soup|vegetable curry|fried rice|sushi|tacos|lasagna|pizza
dough|mashed potatoes|roast beef|grilled fish|lentil stew|chicken noodle soup|Caesar salad|hummus|guacamole|french
fries|an omelette|a cheese sandwich|oatmeal|granola|yogurt|strawberry jam|peanut butter|vanilla ice cream|lemonade|hot
chocolate|green tea|espresso|a fruit smoothie|banana bread|cinnamon rolls|scones|waffles|dumplings|spring rolls|paella|
risotto|ratatouille|goulash|a vegetarian burger|meatballs|pesto|mayonnaise|pickled cucumbers|kimchi|tofu|olive oil|
honey mustard dressing|garlic bread|chili con carne|shepherd's pie|a cheesecake|brownies|rice pudding|popcorn"""

SCIENCE = """electricity|magnetism|sound waves|light refraction|radioactivity|nuclear fusion|friction|inertia|momentum|
kinetic energy|entropy|evaporation|condensation|osmosis|diffusion|fermentation|combustion|rust|acids and bases|the
periodic table|atoms|molecules|isotopes|chemical bonds|catalysts|polymers|crystals|plate tectonics|earthquakes|
volcanoes|tsunamis|erosion|glaciers|fossils|the rock cycle|the carbon cycle|the greenhouse effect|the ozone layer|
tides|ocean currents|tornadoes|hurricanes|lightning|rainbows|snowflakes|the northern lights|eclipses|comets|meteorites|
the Milky Way|neutron stars|supernovas|the Big Bang|dark matter|the solar wind|the seasons|leap years|relativity|
quantum mechanics|DNA|genes|chromosomes|mutations|natural selection|evolution|cells|mitochondria|proteins|enzymes|
hormones|the immune system|antibodies|the heart|the lungs|the liver|the kidneys|the brain|nerves|muscles|bones|blood
types|digestion|the sense of smell|colour vision|memory|dreams|symbiosis|food chains|ecosystems|biodiversity|coral
reefs|pollination|seeds|fungi|algae|prime numbers|fractions|percentages|probability|negative numbers|the Pythagorean
theorem|pi|algebra|infinity|symmetry|averages|logarithms|statistics|game theory"""

HISTORY = """the French Revolution|the Industrial Revolution|the fall of the Roman Empire|the Black Death|the Silk
Road|the Vikings|the Crusades|the Ottoman Empire|the Mongol Empire|ancient Greece|ancient Egypt|the Maya|the Aztecs|the
Inca Empire|feudal Japan|the samurai|the Ming dynasty|the Enlightenment|the American Revolution|the American Civil War|
the Second World War|the Cold War|the Berlin Wall|the Space Race|the civil rights movement|women's suffrage|the Great
Depression|the invention of printing|the discovery of penicillin|the first flight of the Wright brothers|the Titanic|
the Olympic Games|the gold rush|the slave trade|the partition of India|the end of apartheid|the Magna Carta|the United
Nations|the Marshall Plan|Julius Caesar|Cleopatra|Alexander the Great|Charlemagne|Genghis Khan|Joan of Arc|Leonardo da
Vinci|Galileo Galilei|Isaac Newton|Marie Curie|Charles Darwin|Albert Einstein|Nikola Tesla|Ada Lovelace|Alan Turing|
Mahatma Gandhi|Nelson Mandela|Martin Luther King|Abraham Lincoln|Queen Victoria|Napoleon|Mozart|Beethoven|William
Shakespeare|Charles Dickens|Frida Kahlo"""

JOBS = """a nurse|a firefighter|a police officer|a primary school teacher|a librarian|a pilot|a train driver|a truck
driver|a farmer|a fisherman|a baker|a butcher|a chef|a waiter|a hairdresser|a tailor|a carpenter|a plumber|an
electrician|an architect|a civil engineer|a software developer|a data analyst|a graphic designer|a photographer|a
journalist|a translator|a novelist|an actor|a musician|a judge|a lawyer|an accountant|a bank clerk|an economist|a
salesperson|a project manager|a human resources manager|a social worker|a psychologist|a dentist|a pharmacist|a
surgeon|a veterinarian|a biologist|a geologist|an astronaut|a park ranger|a gardener|a lifeguard|a football coach|a
referee|a tour guide|a museum curator"""

COMPUTING = """a variable|a loop|recursion|an array|a linked list|a hash table|a binary tree|a stack|a queue|a pointer|
an algorithm|binary search|bubble sort|big O notation|object-oriented programming|functional programming|a compiler|an
interpreter|an operating system|a file system|virtual memory|a CPU|a graphics card|RAM|a solid state drive|a database|
SQL|an index|a transaction|an API|HTTP|a web browser|a cookie|HTML|CSS|JavaScript|Python|the C language|Rust|Git|a unit
test|debugging|continuous integration|a container|cloud computing|a firewall|encryption|a public key|a hash function|
phishing|a computer virus|two-factor authentication|Wi-Fi|Bluetooth|an IP address|DNS|a router|open source software|a
neural network|a decision tree|overfitting|a chatbot|a search engine|a spreadsheet|a regular expression|JSON|Unicode|a
cache|a race condition|a deadlock"""

CODE = """adds two numbers|finds the largest number in a list|counts the vowels in a word|checks whether a number is
even|checks whether a word is a palindrome|computes the factorial of a number|prints the Fibonacci numbers|sorts a list
of names|removes duplicates from a list|counts the words in a text|converts Celsius to Fahrenheit|converts kilometres
to miles|computes the average of a list|checks whether a year is a leap year|finds the smallest common multiple|checks
for prime numbers|merges two dictionaries|reads a file line by line|writes a list to a file|draws a random card|rolls
two dice|asks the user for a name and greets them|computes compound interest|computes the area of a circle|prints a
multiplication table|finds the longest word in a sentence|capitalises each word|splits a text at commas|flattens a
nested list|transposes a matrix|searches a sorted list|counts how often each letter occurs|generates a random password|
validates an e-mail address|computes the days between two dates|converts a number to binary|sums the digits of a
number|swaps two variables|rotates a list by one place|finds the common items of two lists"""

HEALTH = """headaches|the common cold|hay fever|back pain|high blood pressure|diabetes|asthma|sunburn|a sprained ankle|
a sore throat|stress at work|anxiety|loneliness|poor sleep|snoring|dehydration|food allergies|tooth decay|eye strain|
vitamin D|iron in the diet|dietary fibre|caffeine|sugar|salt|alcohol|walking every day|stretching|cold showers|fasting|
a vegetarian diet|first aid|hand washing|sun protection|a regular sleep schedule|breathing exercises|healthy snacks|
drinking enough water"""

MONEY = """interest rates|compound interest|a mortgage|a credit card|a credit score|a savings account|a pension|stocks|
bonds|an index fund|diversification|supply and demand|taxes|a tariff|unemployment|gross domestic product|exchange
rates|a recession|a monopoly|insurance|an emergency fund|a household budget|debt|bankruptcy|a startup|venture capital|a
business plan|marketing|a brand|customer loyalty|an invoice|profit margins|crowdfunding|fair trade|globalisation|
minimum wage|inheritance|cash|a central bank|cryptocurrency"""

SOCIETY = """democracy|a constitution|human rights|freedom of speech|the separation of powers|a referendum|a jury|a
trade union|public transport|urban planning|recycling|renewable energy|climate change|deforestation|overfishing|plastic
waste|air pollution|organic farming|veganism|migration|education|homework|school uniforms|remote work|social media|fake
news|online privacy|video games|artificial intelligence|self-driving cars|space exploration|nuclear power|tourism|
museums|public libraries|volunteering|friendship|leadership|creativity|curiosity|patience|honesty|courage|kindness|
teamwork|time management|critical thinking|gratitude|empathy|jealousy|nostalgia|luck|happiness|boredom|procrastination|
perfectionism|jazz|opera|classical music|hip hop|ballet|impressionism|cubism|photography|architecture|film|theatre|
comic books|fairy tales|mythology|philosophy|stoicism|logic|ethics|religion|Buddhism|the Chinese New Year|Halloween|
Christmas|football|basketball|cricket|baseball|cycling|chess|the marathon|the World Cup"""

WORDS = """serendipity|ubiquitous|melancholy|resilient|ambiguous|benevolent|candid|diligent|eloquent|frugal|gregarious|
hypothesis|impartial|jubilant|keen|lucid|meticulous|nonchalant|obsolete|pragmatic|quaint|reluctant|sceptical|tedious|
unanimous|vivid|whimsical|zealous|paradox|irony|analogy|hyperbole|alliteration|oxymoron|synonym|idiom|adverb|pronoun|
gerund|conjunction|break the ice|a piece of cake|once in a blue moon|the last straw|bite the bullet|spill the beans|
under the weather"""

SUBJECTS = """a lost key|an old lighthouse keeper|a robot who learns to paint|a dragon that is afraid of fire|a night
train|the first snow of the year|a garden at dawn|a boy and his kite|a girl who talks to trees|a clock that runs
backwards|two brothers and a boat|a forgotten library|a stray dog|a letter from the past|a small island|the last day of
school|a thunderstorm|an empty theatre|a secret door|a travelling circus|a wise owl|a broken violin|a desert caravan|a
city under the sea|a visit to the moon|a baker who cannot sleep|a king without a crown|a talking mirror|a market in
spring|my grandfather's watch|a river in summer|mountains in the mist|autumn leaves|a cup of tea|moving to a new town|a
long walk home|missing the bus|a football match in the rain|a summer night|a new friendship|the smell of bread|a candle
in the window|a house full of cats|a shooting star|a quiet morning|an unexpected guest|a pirate's treasure|a haunted
hotel|a time machine|a chess game|a scientist who makes a mistake|the wind|hope|silence|the colour blue|winter stars|a
mother's hands|an old bridge|a red balloon|a village festival"""

LETTERS = """a landlord about a broken heater|a teacher about a missed class|a neighbour about loud music|a friend who
moved away|a hotel to ask for a late check-out|a shop to return a pair of shoes|a colleague who is leaving|a customer
whose parcel is late|a professor to ask for a recommendation|a bank about a lost card|a city council about a dangerous
crossing|a new employee to welcome them|an airline about a cancelled flight|a doctor to move an appointment|a cousin
who got married|a team to thank them for their work|a supplier about a wrong invoice|a library about a lost book|a
sports club to end a membership|a restaurant to book a table for ten|a landlord to end a lease|parents about a school
trip|a client to present an offer|a company to ask about an internship|a friend to say sorry for being late|an editor
to propose an article"""

PAIRS = """cats and dogs|tea and coffee|trains and planes|books and films|summer and winter|cities and villages|apples
and oranges|Python and Java|Linux and Windows|laptops and tablets|electric cars and petrol cars|renting and buying a
home|running and swimming|yoga and weight training|novels and short stories|butter and margarine|rice and pasta|stocks
and bonds|bacteria and fungi|mammals and reptiles|plants and animals|atoms and molecules|speed and velocity|mass and
weight|heat and temperature|a comet and an asteroid|a planet and a star|a lake and a sea|a hurricane and a tornado|a
frog and a toad|a crocodile and an alligator|a violin and a cello|a piano and an organ|a city and a town|a republic and
a monarchy|capitalism and socialism|a debit card and a credit card|a manager and a leader|a list and a tuple|a process
and a thread|a compiler and an interpreter|HTTP and HTTPS|RAM and disk storage|TCP and UDP|a noun and a verb|active and
passive voice|fiction and nonfiction|poetry and prose|opera and musical theatre|watercolour and oil paint|baking and
frying|a stew and a soup|jam and jelly|empathy and sympathy|online and classroom courses|handwriting and typing"""

SITUATIONS = """my neighbour's dog barks all night|I forgot my best friend's birthday|I have to speak in front of fifty
people|my phone fell into water|I spilled ink on the carpet|my flight is delayed by six hours|I lost my wallet on the
bus|my houseguest does not want to leave|I cannot decide between two job offers|my child does not want to eat
vegetables|my plants have yellow leaves|there are ants in my kitchen|my computer is very slow|the internet does not
work at home|my car makes a strange noise|I burnt the rice|I have only eggs and potatoes at home|I am bored on a rainy
Sunday|I want to surprise my parents|my room is always cold|I feel tired every afternoon|my shoes are wet|I have a job
interview tomorrow|I failed an exam|my colleague takes credit for my work|my team misses every deadline|I moved to a
city where I know nobody|my bicycle was stolen|I found a wounded bird|I locked myself out|my sister and I argue a lot|
my cat scratches the sofa|I have to write a speech for a wedding|my salary is late|I got a wrong bill|I cannot
concentrate in the evening|I want to learn to cook but have no time|my garden is full of weeds|I am afraid of flying|my
bread does not rise|my windows are foggy every morning|I have a cold and an important meeting|my friend never answers
my messages|I ate something that was past its date|I want to start running but I hate it|my desk is always a mess|I
need a cheap gift"""

CLAIMS = """water boils at a lower temperature on a mountain|bats are blind|goldfish have a memory of three seconds|
lightning never strikes twice|the Great Wall can be seen from space|sugar makes children hyperactive|humans use ten
percent of the brain|sharks are mammals|the Sun is a star|glass is a liquid|bananas grow on trees|whales are fish|
diamonds are made of carbon|sound travels faster than light|the heart is a muscle|spiders are insects|Venus is hotter
than Mercury|the Sahara is the largest desert|penguins live at the North Pole|tomatoes are fruits|an octopus has three
hearts|gold is heavier than lead|the Nile is longer than the Amazon|Mount Everest grows every year|ice floats on water|
plants breathe at night|camels store water in their humps|the Moon has its own light|a year on Mars is longer than on
Earth|all mammals give birth to live young|owls can turn their heads all the way round|hot water freezes faster than
cold water|the tongue has separate zones for tastes|zero is an even number|a square is a rectangle|every prime number
is odd|copper conducts electricity|the Eiffel Tower grows in summer|honey never spoils|the dodo is extinct"""

LISTS = """countries in Africa|rivers in Europe|inventions of the nineteenth century|programming languages|musical
instruments|classic novels|board games|root vegetables|tropical fruits|spices|kinds of cheese|dog breeds|birds that
cannot fly|animals that sleep in winter|insects that help farmers|trees that lose their leaves|flowers for a balcony|
herbs for the kitchen|winter sports|team sports|water sports|hobbies for quiet people|games for a long car ride|ideas
for a birthday party|gifts for a teacher|names for a goldfish|names for a bakery|titles for a fantasy novel|questions
for a first date|questions to ask at the end of an interview|ways to say thank you|ways to reduce waste at home|ways to
make a room cosy|reasons to read every day|reasons to visit a museum|habits of good students|mistakes that new managers
make|things to take to the beach|things to check before renting a flat|tools that every home needs|safety rules for a
laboratory|renewable energy sources|ancient civilisations|Greek gods|planets and their moons|chemical elements that are
metals|shapes with straight sides|units of length|figures of speech|famous scientists|female inventors|jazz musicians|
composers|directors of classic films|languages spoken in Asia|mountain ranges|islands in the Pacific|world religions|
types of clouds"""

PASSAGES = """The town had one bakery, and it opened at five. On Mondays the queue reached the church. Nobody
complained, because the rolls were warm and the baker knew every name.|Trams once ran through most large cities. They
were replaced by buses in the fifties, which were cheaper to run. Today many cities build new tram lines to reduce
traffic and noise.|Sea otters eat sea urchins, and sea urchins eat kelp. Where otters were hunted, urchins spread and
the kelp forests vanished. When the otters came back, the kelp did too.|A new library card is free for residents.
Visitors pay five euros a month. Books may be kept for four weeks and renewed twice, unless another reader is waiting.|
The meeting began late because the projector failed. The team agreed to move the launch to May. Two more testers will
join, and the budget stays as it is.|Salt was once so valuable that towns were built around it. It kept meat and fish
from spoiling. With refrigeration, its price fell and its trade routes were forgotten.|Most of the island is covered by
forest. In the north there are steep cliffs, where thousands of sea birds nest in spring. The only village lies in the
south, beside a small harbour.|The recipe needs two onions, three carrots and a litre of stock. Everything is cut small
and simmered for forty minutes. A spoon of vinegar at the end makes the taste brighter.|Our survey asked two hundred
commuters how they travel. Half of them take the train, a third drive, and the rest cycle or walk. Most drivers said
they would change if trains were more punctual.|Clocks in old towers were wound by hand every day. The keeper climbed
the stairs with a lamp, turned the crank and oiled the wheels. If he fell ill, the whole town was late.|Bamboo grows
faster than any tree, and it needs little water. It can be made into floors, paper and even bicycles. Because its roots
hold the soil, it also protects slopes from rain.|The museum will be closed in March for repairs. The collection of old
maps moves to the second floor. From April on, tickets can be bought online only.|Honeyguides are birds that lead
people to the nests of wild bees. People open the nest with smoke and take the honey. The birds eat the wax that is
left behind.|My first flat was so small that the door hit the bed. In winter the window froze from the inside. Still, I
remember it fondly, because it was mine.|The company makes bicycle lamps. Sales fell last year, since a cheaper rival
appeared. A new lamp, which charges from the wheel, is planned for the autumn.|Polar nights last for weeks in the far
north. People use bright lamps in the morning to stay awake. When the sun returns, schools close for a day and everyone
goes outside.|The first computers filled whole rooms. They were programmed with cables and switches, and a single
mistake could take days to find. A cheap phone today is millions of times faster.|Every autumn the lake is drained to
catch the carp. Hundreds of people come to watch. The fish are sold on the shore, and in the evening there is music.|
The patient should rest for two days and drink plenty of water. The tablets are taken after meals. If the fever lasts
longer than three days, please call the clinic.|Two friends found a wallet in the park. One wanted to keep the money;
the other wanted to bring it back. They flipped a coin, and then returned it anyway."""


def split(text: str) -> tuple[str, ...]:
    """Return the topics of a block of text, whose line breaks are spaces."""
    return tuple(" ".join(part.split()) for part in text.split("|"))


TOPICS: dict[str, tuple[str, ...]] = {
    "thing": split(THINGS),
    "activity": split(ACTIVITIES),
    "place": split(PLACES),
    "animal": split(ANIMALS),
    "food": split(FOODS),
    "science": split(SCIENCE),
    "history": split(HISTORY),
    "job": split(JOBS),
    "computing": split(COMPUTING),
    "code": split(CODE),
    "health": split(HEALTH),
    "money": split(MONEY),
    "society": split(SOCIETY),
    "word": split(WORDS),
    "subject": split(SUBJECTS),
    "letter": split(LETTERS),
    "pair": split(PAIRS),
    "situation": split(SITUATIONS),
    "claim": split(CLAIMS),
    "list": split(LISTS),
    "passage": split(PASSAGES),
}
