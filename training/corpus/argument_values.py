"""Values of arguments as users phrase them: places, times, amounts, messages.

Real values are mixed with made-up ones, which teach copying: a value of a kind may be anything. A
kind is a function of Words that returns the text.
"""

import random
from collections.abc import Callable

from training.corpus.words import ADJECTIVES, ANIMALS, Words

CITIES = (
    "Lisbon,Oslo,Paris,Tokyo,Madrid,Berlin,Rome,Cairo,Lima,Dublin,Vienna,Prague,Athens,Porto,Milan,"
    "Boston,Chicago,Seattle,Toronto,Sydney,Mumbai,Seoul,Zurich,Geneva,Warsaw,Kyoto,Osaka,Denver,"
    "London,New York,San Francisco,Los Angeles,New Delhi,Hong Kong,Singapore,Bangkok,Jakarta,"
    "Manila,"
    "Nairobi,Lagos,Accra,Casablanca,Tunis,Algiers,Cape Town,Johannesburg,Addis Ababa,Rio de "
    "Janeiro,"
    "Buenos Aires,Santiago,Montevideo,La Paz,Quito,Caracas,Havana,Mexico City,Vancouver,Montreal,"
    "Salt Lake City,Las Vegas,Phoenix,Dallas,Austin,Miami,Atlanta,St. Louis,New Orleans,Portland,"
    "Moscow,Kiev,Helsinki,Stockholm,Copenhagen,Reykjavik,Tallinn,Riga,Vilnius,Budapest,Belgrade,"
    "Sofia,Bucharest,Istanbul,Ankara,Tehran,Baghdad,Riyadh,Dubai,Doha,Karachi,Lahore,Dhaka,Colombo,"
    "Kathmandu,Hanoi,Ho Chi Minh City,Kuala Lumpur,Shanghai,Beijing,Taipei,Perth,Melbourne,"
    "Auckland,"
    "Munich,Hamburg,Cologne,Frankfurt,Leipzig,Dresden,Salzburg,Innsbruck,Bern,Basel,Lyon,Marseille,"
    "Nice,Bordeaux,Toulouse,Brussels,Antwerp,Amsterdam,Rotterdam,Utrecht,Barcelona,Seville,"
    "Valencia,"
    "Naples,Venice,Florence,Turin,Palermo,Edinburgh,Glasgow,Cardiff,Belfast,Manchester,Leeds,"
    "Bristol"
).split(",")
ACCENTED = (
    "München,Zürich,Köln,Düsseldorf,Nürnberg,Würzburg,Lübeck,Göteborg,Malmö,Ålesund,Tromsø,Århus,"
    "Kraków,Łódź,Gdańsk,Wrocław,Poznań,São Paulo,Brasília,Belém,Florianópolis,Bogotá,Medellín,"
    "Cancún,Mérida,Córdoba,Málaga,Cádiz,León,A Coruña,Besançon,Nîmes,Orléans,Saint-Étienne,Québec,"
    "Montréal,Genève,Liège,Plzeň,České Budějovice,Brno,Košice,Székesfehérvár,Győr,Cluj-Napoca,"
    "Iași,Timișoara,İzmir,Eskişehir,Diyarbakır,Şanlıurfa,Hafnarfjörður,Reykjavík,Jyväskylä,Pärnu,"
    "Šiauliai,Klaipėda,Đà Nẵng,Hà Nội,Cần Thơ,Asunción,Ñemby,Tórshavn,Bodø,Jönköping,Växjö"
).split(",")
FOREIGN = (
    "東京,京都,大阪,札幌,横浜,名古屋,神戸,福岡,仙台,広島,北京,上海,广州,深圳,成都,西安,台北,高雄,香港,南京,"
    "서울,부산,인천,대구,광주,제주,Москва,Казань,Сочи,Омск,Екатеринбург,Владивосток,Київ,Львів,Одеса,Минск,"
    "София,Пловдив,Београд,Скопје,Αθήνα,Θεσσαλονίκη,Πάτρα,Ηράκλειο,القاهرة,دبي,بغداد,الرياض,"
    "بيروت,تهران,"
    "תל אביב,ירושלים,חיפה,दिल्ली,मुंबई,कोलकाता,ঢাকা,กรุงเทพ,เชียงใหม่,თბილისი,Երևան,Алматы,"
    "Ташкент,Ереван"
).split(",")
LETTERS = (
    "абвгдежзиклмнопрстуфхцчшэюя", "αβγδεζηθικλμνξοπρστυφχψω",
    "あいうえおかきくけこさしすせそたちつてとなにぬねのはまみむめもやゆよらりるれろ",
    "アイウエオカキクケコサシスセソタチツテトナニヌネノ"
    "ハマミムメモヤユヨラリルレロン",
    "山川田中本木村大小林森石水金土日月火花東西南北"
    "京都市町野原島谷高橋松井上下",
    "가나다라마바사아자차카타파하강산서울부대전광주인천수원성남고양용",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "àáâäãåæçèéêëìíîïñòóôöõøùúûüýşğłńśźżčřšžěďťň",
)  # fmt: skip
COUNTRIES = (
    "France,Germany,Italy,Spain,Portugal,Norway,Sweden,Finland,Denmark,Iceland,Poland,Austria,"
    "Kenya,"
    "Switzerland,Greece,Turkey,Egypt,Nigeria,Ghana,Morocco,South Africa,India,China,Japan,Vietnam,"
    "South Korea,Thailand,Indonesia,Australia,New Zealand,Canada,Mexico,Brazil,Argentina,Chile,"
    "Peru,"
    "Colombia,Cuba,Jamaica,Ireland,Belgium,the Netherlands,the United States,Ukraine,Romania,Nepal"
).split(",")
FIRST = (
    "Alice Bob Carol David Emma Frank Grace Henry Julia Kevin Laura Maria Nina Oscar Paul Quentin "
    "Rosa Simon Tina Ursula Victor Wendy Xavier Yvonne Zoe Ahmed Aisha Chen Mei Hiroshi Keiko Raj "
    "Anita Olga Dmitri Sven Ingrid Lars Pierre Chloé Jürgen Björn Zoë José Inés Łukasz Siobhán "
    "Omar "
    "Fatima Kwame Amara Tom Jim Ann Sue Joe Max Ben Sam Kim Lee Anna Eva Ida Leo Noah Mia Ella Luis"
).split()
LAST = (
    "Smith Jones Brown Miller Davis Garcia Wilson Moore Taylor Thomas Jackson White Harris Martin "
    "Thompson Young King Wright Hill Scott Green Baker Adams Nelson Carter Kowalski Novak Müller "
    "Schmidt Rossi Bianchi Dubois Ivanov Petrov Nakamura Tanaka Kim Park Nguyen Singh Patel Khan"
).split()
RELATIVES = (
    "mum,dad,mom,grandma,grandpa,my sister,my brother,my boss,my wife,my husband,my landlord,uncle,"
    "my mother,my father,my aunt,my neighbour,my colleague,the doctor,the plumber,the office,my "
    "son,"
    "my daughter,the team,everyone,the kids,my teacher,the manager,the bank,the school,the dentist"
).split(",")
TITLES = "Mr. Ms. Mrs. Dr. Professor Doctor aunt uncle".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
RELATIVE_DAYS = (
    "today,tomorrow,tonight,next Monday,next Friday,next week,this weekend,this Sunday,"
    "next Tuesday,the day after tomorrow,this evening,next Saturday,tomorrow morning"
).split(",")
ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

LISTS: dict[str, list[str]] = {
    kind: text.split(",")
    for kind, text in {
        "currency": "euros,dollars,pounds,yen,francs,Swiss francs,rupees,pesos,kronor,zloty,won,"
        "US dollars,EUR,USD,GBP,JPY,CHF,SEK,NOK,PLN,INR,CNY,AUD,CAD,BRL,MXN,KRW,TRY,bitcoin,rubles,"
        "Canadian dollars,dirhams,lira,shekels,baht,rand,eur,usd,gbp,kroner,crowns,yuan,forint",
        "artist": "the Beatles,Queen,Adele,Miles Davis,Nina Simone,David Bowie,Björk,Daft Punk,"
        "Abba,"
        "Radiohead,Bach,Mozart,Taylor Swift,Bob Dylan,Johnny Cash,Beyoncé,Pink Floyd,Metallica,U2,"
        "the Rolling Stones,Led Zeppelin,Ella Fitzgerald,Coldplay,Rihanna,Drake,Shakira,Rammstein",
        "room": "kitchen,bedroom,living room,bathroom,hallway,garage,attic,cellar,basement,office,"
        "study,nursery,dining room,corridor,guest room,kids' room,garden,hall,laundry room,lobby,"
        "pantry,library,staircase,balcony,terrace,conference room,workshop,entrance,porch,playroom",
        "door": "front door,back door,garage door,main door,side door,cellar door,kitchen door,"
        "gate,"
        "garden gate,patio door,balcony door,office door,main entrance,barn door,shed,front gate",
        "food": "pizza,cheeseburger,pad thai,sushi,ramen,lasagne,caesar salad,falafel,fish and "
        "chips,"
        "burritos,tacos,spring rolls,chicken wings,tomato soup,pancakes,hot dogs,dumplings,curry,"
        "pepperoni pizza,vegan burger,green curry,fried rice,noodles,kebab,gyros,paella,risotto,"
        "bagels,croissants,ice cream,apple pie,tiramisu,sandwiches,salad,large fries,chicken soup",
        "ingredient": "tomatoes,lentils,chickpeas,salmon,tofu,rice,spinach,potatoes,eggs,cheese,"
        "milk,"
        "bread,butter,onions,garlic,mushrooms,zucchini,pumpkin,chicken,beef,tuna,apples,bananas,"
        "carrots,beans,pasta,flour,sugar,leeks,cabbage,quinoa,avocado,basil,walnuts,oats,honey,"
        "olive oil,yoghurt,peppers,aubergine,broccoli,lemons,shrimp,pork,cauliflower,coffee,tea",
        "ate": "a bowl of soup,two eggs,a banana,a slice of pizza,an apple,rice with beans,"
        "a chicken salad,a cheese sandwich,three pancakes,a plate of pasta,some nuts,yoghurt,"
        "a glass of milk,fish and potatoes,oatmeal,a burger,toast with jam,vegetable curry,sushi,"
        "a tuna sandwich,a bowl of rice,one croissant,a piece of cake,grilled fish,a protein shake",
        "product": "wireless mouse,desk lamp,coffee mug,running shoes,backpack,headphones,umbrella,"
        "office chair,water bottle,phone case,keyboard,monitor,winter jacket,sunglasses,notebook,"
        "tent,sleeping bag,bicycle helmet,rain boots,scarf,watch,wallet,sneakers,jeans,t-shirts,"
        "socks,towels,batteries,light bulbs,toaster,kettle,blender,frying pan,vase,candles,pillow,"
        "laptop,tablet,charger,USB cable,camera,tripod,guitar strings,yoga mat,dumbbells,bike lock,"
        "mugs,plates,pens,desk,bookshelf,carpet,mirror,hair dryer,toothbrush,shampoo,gloves,hat",
        "colour": "red,blue,green,yellow,black,white,grey,purple,orange,pink,brown,silver,"
        "turquoise,"
        "dark blue,light green,beige,gold,violet,navy,crimson",
        "language": "French,German,Spanish,Italian,Dutch,Polish,Portuguese,Swedish,Japanese,Korean,"
        "Chinese,Russian,Arabic,Hindi,Greek,Turkish,Finnish,Danish,Norwegian,Czech,Hungarian,Latin,"
        "Swahili,Vietnamese,Thai,Hebrew,English,Ukrainian,Romanian,Icelandic,Welsh,Irish,Catalan",
        "measure": "meters,feet,inches,cm,centimeters,miles,kilometers,km,yards,mm,kilograms,kg,"
        "grams,"
        "pounds,ounces,tons,liters,gallons,cups,pints,ml,hours,minutes,seconds,days,celsius,lbs,"
        "fahrenheit,acres,hectares,stone,m,light years,knots,mph,degrees,radians,bytes,megabytes",
        "word": "report,invoice,budget,notes,draft,summary,photos,backup,archive,music,projects,"
        "logs,"
        "holiday,taxes,contract,thesis,recipe,letter,data,results,cats,dogs,work,physics,lawyers",
        "rare_word": "ubiquitous,ephemeral,serendipity,quixotic,lucid,arcane,benevolent,candid,"
        "diligent,eloquent,frugal,gregarious,hubris,impartial,jovial,laconic,meticulous,nefarious,"
        "obsolete,paradigm,quorum,resilient,sanguine,tenacious,verbose,wary,zeal,entropy,irony,"
        "metaphor,cognition,inertia,altruism,apathy,conundrum,dichotomy,epiphany,facade,gist,idiom",
        "doctor": "dentist,dermatologist,cardiologist,eye doctor,optician,neurologist,surgeon,"
        "pediatrician,physiotherapist,psychologist,gynecologist,urologist,allergist,radiologist,"
        "orthopedist,family doctor,general practitioner,oncologist,ear specialist,vet,therapist",
        "service": "nginx,redis,postgres,mysql,apache,docker,kafka,rabbitmq,elasticsearch,grafana,"
        "prometheus,cron,sshd,mongodb,billing,auth,search,gateway,payments,frontend,backend,mailer,"
        "worker,scheduler,login-service,user-api,cache,proxy,database",
        "department": "marketing,sales,accounting,engineering,legal,finance,support,research,"
        "design,"
        "human resources,IT,logistics,purchasing,operations,security,production,quality,HR",
        "venue": "pharmacy,gas station,coffee shop,bakery,bank,supermarket,ATM,hospital,post "
        "office,"
        "park,library,museum,gym,cinema,parking lot,bus stop,restaurant,hotel,bookshop,playground,"
        "hairdresser,dentist,charging station,florist,swimming pool,police station,bar,laundromat,"
        "pizza place,sushi restaurant,school,church,vet,butcher,hardware store,toilet,beach,café",
        "app": "Spotify,the calculator,Chrome,Firefox,Word,Excel,Photoshop,the camera,Slack,Zoom,"
        "WhatsApp,Netflix,the browser,the settings,Maps,Teams,Telegram,Outlook,Steam,Notes,Signal",
        "sport": "running,swimming,yoga,cycling,tennis,football,rowing,boxing,pilates,climbing,"
        "squash,"
        "jogging,weight lifting,dancing,basketball,skiing,hiking,badminton,stretching,push-ups",
        "garden": "lawn,roses,tomatoes,flower bed,front yard,back yard,garden,hedge,vegetable "
        "patch,"
        "greenhouse,orchard,herbs,balcony plants,tulips,meadow,cucumbers,terrace",
        "pet": "cat,dog,hamster,parrot,rabbit,fish,turtle,guinea pig,kitten,puppy,goldfish,canary",
        "team": "Lakers,Real Madrid,Bayern,Arsenal,Yankees,Juventus,Chelsea,Red Sox,Ajax,Celtics,"
        "Liverpool,Barcelona,Warriors,Celtic,Dortmund,Benfica,Rangers,Dodgers,Cubs,Porto",
        "job": "nurse,teacher,plumber,software engineer,carpenter,cook,waiter,lawyer,accountant,"
        "electrician,driver,designer,journalist,gardener,barista,mechanic,translator,data analyst",
        "document": "contract,report.pdf,invoice.pdf,letter.docx,my ticket,agenda,minutes,"
        "boarding pass,slides.pptx,manual,cv.pdf,map,photo.png,menu.docx,form,receipt,"
        "presentation,homework,notes.txt,schedule.xlsx,essay,brochure,certificate",
        "bill": "electricity,phone,water,gas,internet,rent,credit card,insurance,heating,hospital",
        "label": "medicine,work,school,gym,Ski Trip,holiday,party mix,Book Club,family,morning run,"
        "flight,breakfast,ideas,Road Trip,weekend,Summer Hits,focus,dinner,pills,study group",
        "reason": "it is broken,wrong size,it arrived too late,the color is wrong,I changed my "
        "mind,"
        "it does not fit,too small,it is damaged,a part is missing,the screen is cracked,too heavy,"
        "it never worked,it is the wrong model,defective,it smells bad,it is too loud,not needed",
        "bug": "Crash on startup,Login page is blank,dark mode,Memory leak in the parser,slow "
        "search,"
        "Typo in the manual,Button does not work,export to PDF,Wrong total in the cart,broken link,"
        "Timeout when saving,add a search field,Error 500 on upload,Images are not loaded,"
        "support for Windows,The menu flickers,keyboard shortcuts,wrong time zone in the log",
        "commit": "Fix typo in header,Add login page,bump version,Update README,remove dead code,"
        "refactor the parser,Fix crash on empty input,add tests for the cache,Improve error "
        "messages,"
        "first version,rename variables,Merge the new layout,speed up the search,clean up,wip",
        "sql": "SELECT * FROM users,SELECT name FROM orders WHERE id = 5,DELETE FROM logs,"
        "SELECT count(*) FROM events,UPDATE items SET price = 3 WHERE id = 9,SHOW TABLES,"
        "SELECT id FROM customers ORDER BY name LIMIT 10",
        "meeting_room": "Einstein,Room 4,Blue Room,Curie,Aquarium,3.14,Boardroom,B12,Newton,"
        "Atlantis,"
        "Room 201,the big one,Studio,Garden Room,A-7,Everest,Library,Turing",
        "option": "pizza,pasta,Monday,Tuesday,yes,no,maybe,red,blue,tea,coffee,beach,mountains,"
        "cats,"
        "dogs,morning,evening,summer,winter,train,car,bike",
        "landmark": "the airport,the station,the main station,Central Park,Times Square,the old "
        "town,"
        "the city centre,home,work,the office,the museum,the hospital,Union Square,the harbour,"
        "the university,the stadium,the opera,the zoo,the town hall,Piccadilly Circus,the library,"
        "the mall,the beach,the cathedral,my hotel,the castle,Gate 4,terminal 2,the bus station",
        "station_name": "Gare du Nord,King's Cross,Hauptbahnhof,Utrecht Centraal,Grand Central,"
        "Victoria Station,Roma Termini,Atocha,Penn Station,Paddington,Gare de Lyon,Wien Mitte,"
        "Union Station,Shinjuku,Milano Centrale,Basel SBB,Antwerpen-Centraal,Warszawa Centralna",
        "movie": "Inception,Casablanca,The Godfather,Dune,Titanic,Metropolis,Alien,Jaws,Psycho,Up,"
        "The Matrix,Pulp Fiction,Amélie,Vertigo,Toy Story,Gladiator,Star Wars,Rocky,Hamlet,Cats,"
        "Swan Lake,The Lion King,Oppenheimer,Parasite,Spirited Away,Goodfellas,Emma,Dracula,Heat,"
        "Yesterday,Imagine,Hey Jude,Blue Monday,Hotel California,Thriller,Hallelujah,Clair de Lune,"
        "Moby Dick,Ulysses,Middlemarch,The Trial,Siddhartha,Persuasion,The Stranger,Walden",
        "restaurant_name": "Bella Roma,Golden Fig,Luigi's,The Anchor,Chez Paul,Osteria Luna,Kiku,"
        "Noma,"
        "Bangkok Garden,Taj Mahal,Burger Barn,Umi,Dolce,Le Bistro,El Toro,Blue Dragon,Pizza Hut,"
        "The Red Lion,Casa Pepe,Sushi Bar Edo,McDonald's,Café Central,Trattoria da Mario,Zum Adler",
        "company_name": "Acme,Globex,Initech,the Red Cross,UNICEF,Stark Industries,Siemens,"
        "Greenpeace,"
        "the animal shelter,Wayne Enterprises,Contoso,the food bank,Doctors Without Borders,"
        "Umbrella",
    }.items()
}

TASKS = (
    "call {p},call the {x},buy {i},buy {i} and {i},water the plants,pay the {b} bill,take out the "
    "trash,clean the {r},walk the dog,feed the cat,write to {p},book the {x},renew my "
    "passport,fix the {x},return the {x},pick up {p},pick up the {x},finish the {x},send the {x} "
    "to {p},read the {x},do the dishes,do the laundry,wash the car,go to the gym,check the "
    "{x},visit {p},order {i},bring the {x} to {p},print the {x},charge my phone,take my "
    "pills,prepare the {x},cancel the {x},update the {x},learn {l},bake a cake,iron the "
    "shirts,review the {x},cook dinner,lock the {d},submit the {x},mow the lawn,get a "
    "haircut,tidy up the {r},sell the {x},paint the {r},practice piano,back up the {x},meet "
    "{p},turn off the oven,talk to {p} about the {x},look for the {x},ask {p} about the {a} "
    "{x},drop the {x} off at {p}'s place,exchange the {a} {x} for a bigger one,pick up the {x} "
    "and the {x} from {p},compare the prices of the {x} and the {x},thank {p} for the {x},order "
    "new {z} for the {r},send {p} the {x} of the {x},measure the window in the {r},check whether "
    "the {x} is still {a},bring back the {x} that {p} lent me,read up on {k},sign up for the {s} "
    "course in {o},replace the {x} in the {r},put new batteries in the {x},apologise to {p} for "
    "the {x},find out how to {h},oil the hinges of the {d},write the {x} for the {x} meeting"
).split(",")
THINGS = (
    "the {x},the {x} {x},the meeting with {p},the {b} bill,the parking meter,my pills,the laundry,"
    "{p}'s birthday,the oven,the {r} window,dinner with {p},the dentist,the {i},the rent,the dog,"
    "the {a} {x} in the {r},the call with {p} and {p},the deadline of the {x} project,the {x} that "
    "{p} wanted,the last day of the {x} sale,{p} and {p}'s anniversary,the {B} {x}"
).split(",")
CLAUSES = (
    "I'm {w},I am {w},I will be {w},I'll be there at {t},I can't come {e},dinner is ready,we are "
    "{w},the meeting is at {t},the meeting is cancelled,the {x} is {a},the {x} is ready,the {x} "
    "is broken,the {x} has arrived,I need the {x},I found the {x},happy birthday,thank you for "
    "the {x},see you at {t},see you {e},good luck,I love you,call me back,bring the {x},don't "
    "forget the {x},we need {i},the keys are in the {r},the train is late,the {x} starts at "
    "{t},the {x} is due {e},I sold the {x},{p} is sick,{p} is here,{p} will call at {t},the shop "
    "closes at {t},the door is open,practice is moved to {t},our flight is delayed,I have the "
    "{x},it is raining,the package is at the {r} door,everything is fine,I passed the exam,we "
    "won,the contract is signed,lunch is at {t},the password is {c},the code is {c},I miss "
    "you,the party starts at {t},the water is cold,the {x} and the {x} are {a},please bring "
    "{i},the car is in the garage,I'm stuck in traffic,my phone is dead,the {x} costs {n} "
    "euros,there are {n} people here,buy {i} and {i},on my way,running late,we should talk about "
    "the {x},the deadline is {e},I will pay {n} dollars,all good,you were "
    "right,congratulations,the cat is on the roof,school is out {e},the {x} looks great,the {x} "
    "that you lent {p} is {a},{p} and {p} are coming for dinner,I left the {x} on the {x} in the "
    "{r},we can meet in front of the {x} at {t},the {x} will not be ready before {t},I cannot "
    "find the {x} anywhere,nobody told me about the {a} {x},the {d} is locked and {p} has the "
    "{x},somebody has to pick up {p} from the {x},I'll take the next train to {o},the {x} we "
    "ordered has finally arrived,it was great to see you and {p} in {o},the meeting with {p} has "
    "been moved to {t},I would rather do the {x} myself,there is no {i} left in the {r},we start "
    "without {p} and {p},the new {x} is much too {a} for the {r},nobody has to wait for me with "
    "dinner,she can keep the {x},he forgot his {a} {x} in the {r},the {B} {x} does not work,the "
    "{x} opens at {t} and closes at {t},grandma is out of hospital,we took the wrong {x},I got "
    "the job,there are {n} {x}s left,my {x} is at {p}'s place,you can have my {a} {x}"
).split(",")
TOPICS = (
    "the {x},the {x} {x},the new {x},{a} {x},{x} and {x},the history of {k},the {x} in {o},cheap "
    "{z},the best {z},{z} in {o},{k},{k} and {k},the {k} conference,my {x},our {x},the {x} "
    "report,the {x} meeting,the price of {i},{o} {x},{l} grammar,tomorrow's {x},how {k} works,{s} "
    "for beginners,the {a} {a} {x},the {x} of {p},the weekend,the rent,the summer party,{k} in "
    "{y},used {z},{x} prices,the elections,climate change,electric cars,football,the holidays,the "
    "garden,vacation plans,{k} {q},the {x} {q},{a} {x} {q},the {y} elections of {q},{x} in "
    "{q},the best {z} of {q},{k} in {q},machine learning,{z} under {n} dollars,the {x} on the "
    "{x},{k} news,solar panels,the invoice,the {a} {x} of {y} in {q},the differences between {z} "
    "and {z},the effects of {i} on {s},the biggest {x} in the history of {k},what {p} said about "
    "the {x},the opening of the {a} {x} in {o},the new rules for {z} in {y},{z} for the {r},the "
    "best way to {h},the role of {k} in {y},{B} {x},the {B} {z},{p}'s {a} {x},the {x} and the {a} "
    "{x},the trip to {o} with {p},the price of {z} and {z} in {o},the {x} at the {x} on the "
    "{x},the delay of the {x} to {o},the invoice for the {a} {x},{p} and the {x} of {o},why {i} "
    "is good for {s},the {n} best {z},the {x} of the {k} club,an offer for {n} {z}"
).split(",")
HOWTO = (
    "fix a {x},cook {i},learn {l},clean a {x},build a {x},tie a tie,change a tire,grow {i},start "
    "with {s},write a {x},remove a stain,get to {o},save money,sleep better,repair a {x},train a "
    "{t2},play chess,peel {i},sell a {x},open a {x},draw a {t2},make {f},speak {l},boil eggs,tie "
    "a bow,take care of a {a} {x},get from {o} to {o} without a car,explain {k} to children,write "
    "a {a} {x} in {l},keep {i} fresh for a week,choose the right {z},choose between {z} and "
    "{z},put up a {x} in the {r},get rid of the smell of {i},set up a {B} {x},cook {i} with {i} "
    "and {i},teach a {t2} to swim,connect {z} to a {x},build a {x} out of old {z},prepare for a "
    "{k} exam,juggle,whistle"
).split(",")
FIELDS = (
    "chess,physics,history,astronomy,jazz,philosophy,economics,gardening,robotics,biology,baking,"
    "photography,space exploration,artificial intelligence,politics,medicine,coffee,sailing,"
    "fashion,"
    "architecture,volcanoes,dinosaurs,bees,poetry,painting,energy,tennis,travel,music,Roman law"
).split(",")
PHRASES = (
    "good morning,good night,thank you very much,where is the station,how are you,I am "
    "hungry,hello,I would like a coffee,see you tomorrow,what is your name,I love this city,the "
    "cat is black,I am allergic to nuts,can I have the bill,where is the toilet,I do not "
    "understand,excuse me,how much does it cost,I am lost,two beers,have a nice day,could you "
    "show me the way to {o},I have lost my {x} and my {x},we would like to pay separately,is "
    "there a {x} in the {r},my {x} was stolen in {o},the train to {o} leaves from platform "
    "{n},how far is it to {o} on foot,the soup is too cold,{p} has two brothers and a {t2},can "
    "you help me with my {x},what does the {a} {x} cost,the weather is nice,water,nice to meet "
    "you,I speak a little,we are from {o},my name is {p},the {x} is {a},the {a} {x},where is the "
    "{x},I need a {x},the {x} and the {x},{x},{a} {t2},she went to {o},he has a {t2}"
).split(",")
EVENTS = (
    "dentist,lunch with {p},dinner with {p},team meeting,yoga class,piano lesson,book "
    "club,doctor,{x} meeting,meeting with {p},{x} review,birthday party,call with {p},parents' "
    "evening,haircut,job interview,football training,{p}'s birthday,budget review,board "
    "meeting,barbecue,concert,standup,project kickoff,coffee with {p},swimming lesson,{x} "
    "workshop,flight to {o},{s} class,wedding,trip to {o},car inspection,choir practice,math "
    "exam,{x},movie night,game night,retreat,{k} lecture with {p} and {p},farewell drinks for "
    "{p},lunch with {p} and {p},first day at the {x},{p} and {p}'s wedding,meeting about the {a} "
    "{x},{q} {x} planning,{B} {x} demo,dinner at {p}'s place,{l} lesson with {p},annual meeting "
    "of the {k} club,visit to the {k} museum with {p},inspection of the {x} in the {r},talk about "
    "{k} in {y}"
).split(",")
BUGS = (
    "{x} is {a},the {x} does not work,Wrong {x} in the {x},add a {x},{x} crashes,The {x} of the "
    "{a} {x} is lost after a restart,{x} page shows the wrong {x},sort the {x} by {x},Show the "
    "{x} next to the {x},allow several {x}s per {x},{B} {x} is not recognised,{x} export stops "
    "after {n} rows,No {x} in the {x} menu,the {x} of a {a} {x} cannot be changed"
).split(",")
COMMITS = (
    "Add {x},fix {x} in {x},remove {x},Update the {x},rename {x} to {x},Use {x} instead of {x} in "
    "the {x} module,handle a missing {x} in {x},Drop support for {B} {x},Speed up {x} of {x} by "
    "{n} percent,Move the {x} out of the {x},make the {x} optional,check the {x} before the {x} "
    "is sent"
).split(",")
REASONS = (
    "the {x} is {a},it is too {a},the {x} is missing,I ordered the {x} twice by mistake,the {x} "
    "does not work with my {B} {x},the {x} came without the {x},{p} gave me the same one,it is "
    "much too {a} for the {r},the {x} is not the one in the picture,nobody in the family likes it"
).split(",")
FOODS = (
    "{a} {x},{i} {f},{i} {f},{B} {f},{p}'s {f},small {f},large {f},double {i} {f},{l} "
    "{f},homemade {f},{l} {i} soup,spicy {i} noodles,grilled {i}"
).split(",")
MEALS = (
    "a {x} with {i},a {f} with {i} and {i},{u} slices of bread with {i},a bowl of {i} and {i},{u} "
    "{i} pancakes,half a {f},{n} grams of {i},some {i} with {i},a big plate of {i},a cup of {i} "
    "soup,{i} and {i},{u} {B} bars,the rest of the {f},a small {i} salad without {i}"
).split(",")
PRODUCTS = (
    "{B} {z},{B} {z},{n}-inch {z},{m} {z},{m} {z},{a} {B} {z},{z} for the {r},{m} {a} {z},{z} {B},"
    "{B} {m} {z},{B} {x},{m} {x},{B}"
).split(",")
MATERIALS = (
    "wooden,leather,cotton,plastic,steel,bamboo,linen,glass,ceramic,rechargeable,folding,waterproof,"
    "second-hand,extra large,size 42,non-stick,double-walled,solar-powered,woollen,cordless"
).split(",")
SIGNS = "LED,USB,HDMI,XL,3D,4K,A4,A5,DVD,UV,PVC,CR2032,M8,D-type,SD,BBQ,T5,GPS,XXL,E27".split(",")
"""Abbreviations in capitals or with digits that precede a product."""
TITLE_FORMS = (
    "{x},the {a} {x},{a} {x},{x} of {x},the {x},{x} and {x},{p},{o},{p} and the {a} {x},the {x} "
    "who sold the {x},{n} {x}s,a {x} for {p},the last {x} in {o},how {p} lost the {x},{a} {x} "
    "{n},{x} {n},the {x} of the {a} {x},my {x} and I,the {n} {x}s of {p},to the {x}"
).split(",")
STATES = (
    "late,sick,at home,at the office,on the train,ready,tired,in {o},busy,stuck in traffic,on my "
    "way,"
    "ten minutes late,in the {r},not coming,almost there,at the {x},outside,hungry,back at {t}"
).split(",")
SENTENCES = (
    "The {x} of the {x} was {a}.,We met {p} in {o} and talked about the {x}.,The {a} {x} is near "
    "the "
    "{r}.,{p} sold the {x} and bought a {a} {x}.,In {o} the {x} is {a} and the {x} is {a}."
).split(",")


def number_words(n: int) -> str:
    """Return 0 to 9999 in words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{ONES[n // 100]} hundred" + (f" {number_words(n % 100)}" if n % 100 else "")
    rest = f" {number_words(n % 1000)}" if n % 1000 else ""
    return f"{number_words(n // 1000)} thousand{rest}"


def title_case(text: str) -> str:
    """Return the text with each word capitalized."""
    return " ".join(part.capitalize() for part in text.split(" "))


def foreign(w: Words) -> str:
    """Return a name in another script or with accents: a real one or random letters."""
    r = w.rng
    chance = r.random()
    if chance < 0.35:
        return r.choice(ACCENTED)
    if chance < 0.65:
        return r.choice(FOREIGN)
    letters = r.choice(LETTERS)
    name = "".join(r.choices(letters, k=r.randint(2, 6)))
    if letters is LETTERS[-1]:
        word = w.made_up()
        at = r.randint(0, len(word))
        name = word[:at] + name[: r.randint(1, 2)] + word[at:]
    return name.capitalize()


def city(w: Words) -> str:
    """Return a city: real, made up, or in another script."""
    chance = w.rng.random()
    if chance < 0.45:
        return w.rng.choice(CITIES)
    if chance < 0.62:
        return foreign(w)
    if chance < 0.75:
        return f"{w.name()} {w.name()}"
    return w.name()


def first_name(w: Words) -> str:
    """Return a first name."""
    chance = w.rng.random()
    if chance < 0.6:
        return w.rng.choice(FIRST)
    return foreign(w) if chance < 0.66 else w.name()


def person(w: Words) -> str:
    """Return a recipient: a name, a relative, or a role."""
    r = w.rng
    chance = r.random()
    if chance < 0.2:
        return r.choice(RELATIVES)
    if chance < 0.28:
        return f"{r.choice(TITLES)} {r.choice((*LAST, w.name()))}"
    return person_name(w) if chance < 0.4 else first_name(w)


def person_name(w: Words) -> str:
    """Return a first name, or both names."""
    if w.rng.random() < 0.07:
        return f"{w.rng.choice(TITLES)} {w.rng.choice((*LAST, w.name()))}"
    name = first_name(w)
    return f"{name} {w.rng.choice((*LAST, w.name(), w.name()))}" if w.rng.random() < 0.6 else name


def email(w: Words) -> str:
    """Return an email address."""
    r = w.rng
    user = r.choice((w.made_up(), r.choice(FIRST).lower(), f"{w.made_up()}.{w.made_up()}", "info"))
    host = r.choice(("example", "mail", "gmail", w.made_up(), w.made_up()))
    return f"{user}@{host}.{r.choice(('com', 'org', 'net', 'de', 'io', 'it', 'co.uk'))}"


def phone(w: Words) -> str:
    """Return a phone number."""
    r = w.rng

    def digits(n: int) -> str:
        return "".join(r.choices("0123456789", k=n))

    return r.choice(
        (
            f"{digits(3)}-{digits(4)}",
            f"+{r.randint(1, 99)} {digits(3)} {digits(6)}",
            digits(8),
            f"{digits(3)} {digits(3)} {digits(4)}",
            f"+{r.randint(1, 99)} {digits(1)} {digits(4)} {digits(4)}",
            f"0{digits(3)}/{digits(6)}",
        )
    )


def day(w: Words) -> str:
    """Return a weekday, a date, or a relative day."""
    r = w.rng
    chance = r.random()
    if chance < 0.3:
        return r.choice(DAYS)
    if chance < 0.6:
        return r.choice(RELATIVE_DAYS[:3] if r.random() < 0.6 else RELATIVE_DAYS)
    month = r.choice(MONTHS)
    number = r.randint(1, 28)
    year = r.randint(2023, 2032)
    ending = {1: "st", 2: "nd", 3: "rd", 21: "st", 22: "nd", 23: "rd"}.get(number, "th")
    return r.choice(
        (
            f"{month} {number}",
            f"{number} {month}",
            f"{year}-{r.randint(1, 12):02}-{number:02}",
            f"the {number}{ending} of {month}",
            f"{month} {number}{ending}",
            f"{number} {month} {year}",
            f"{number}.{r.randint(1, 12)}.{year}",
            f"{r.choice(DAYS)} {r.choice(('morning', 'evening', 'night'))}",
            f"{r.randint(1, 12)}/{number}",
        )
    )


def clock(w: Words) -> str:
    """Return a time of day."""
    r = w.rng
    hour = r.randint(1, 12)
    minute = r.choice((0, 5, 10, 15, 20, 25, 30, 40, 45, 50, r.randint(0, 59)))
    return (
        r.choice(
            (
                f"{hour} {r.choice(('am', 'pm', 'a.m.', 'p.m.', 'AM', 'PM'))}",
                f"{r.randint(0, 23)}:{minute:02}",
                f"{hour}:{minute:02} {r.choice(('am', 'pm'))}",
                f"{hour} {r.choice(('am', 'pm'))}",
                f"{hour}{r.choice(('am', 'pm'))}",
                f"{number_words(hour)} o'clock",
                f"{hour} o'clock",
                f"half past {number_words(hour)}",
                f"quarter {r.choice(('past', 'to'))} {number_words(hour)}",
                f"{r.randint(6, 23)}:{minute:02}",
                r.choice(("noon", "midnight", "lunchtime", "sunset")),
                f"{number_words(hour)}",
            )
        ).removesuffix(".")
        if r.random() < 0.95
        else f"{hour}"
    )


def _thing(w: Words) -> str:
    """Return a thing."""
    return w.rng.choice((*LISTS["word"], *LISTS["product"])) if w.rng.random() < 0.4 else w.noun()


def filled(w: Words, form: str) -> str:
    """Return the form with its placeholders filled."""
    r = w.rng
    makers: dict[str, Callable[[], str]] = {
        "p": lambda: first_name(w),
        "x": lambda: _thing(w),
        "i": lambda: r.choice(LISTS["ingredient"]),
        "b": lambda: r.choice(LISTS["bill"]),
        "r": lambda: r.choice(LISTS["room"]),
        "t": lambda: clock(w),
        "l": lambda: r.choice(LISTS["language"]),
        "d": lambda: r.choice(LISTS["door"]),
        "w": lambda: filled(w, r.choice(STATES)),
        "e": lambda: r.choice(RELATIVE_DAYS[:3]),
        "a": lambda: r.choice(ADJECTIVES),
        "c": lambda: w.code(),
        "q": lambda: str(r.randint(1900, 2040)),
        "n": lambda: str(r.randint(2, 90)),
        "o": lambda: city(w),
        "k": lambda: r.choice(FIELDS),
        "z": lambda: r.choice(LISTS["product"]),
        "y": lambda: r.choice(COUNTRIES),
        "s": lambda: r.choice(LISTS["sport"]),
        "f": lambda: r.choice(LISTS["food"]),
        "t2": lambda: r.choice(ANIMALS),
        "B": lambda: brand(w),
        "m": lambda: r.choice(MATERIALS),
        "h": lambda: filled(w, r.choice(HOWTO)),
        "u": lambda: r.choice(ONES[2:]),
    }
    while "{" in form:
        head, rest = form.split("{", 1)
        key, tail = rest.split("}", 1)
        form = head + makers[key]() + tail
    return form


def _one(forms: list[str]) -> Callable[[Words], str]:
    """Return a kind that fills one of the forms."""
    return lambda w: filled(w, w.rng.choice(forms))


def _listed(kind: str, make: Callable[[Words], str], share: float = 0.25) -> Callable[[Words], str]:
    """Return a kind that draws from LISTS[kind], or from `make` with probability `share`."""
    return lambda w: make(w) if w.rng.random() < share else w.rng.choice(LISTS[kind])


def brand(w: Words) -> str:
    """Return what precedes a product: a maker, a type, or an abbreviation."""
    r = w.rng
    chance = r.random()
    if chance < 0.35:
        return r.choice(SIGNS)
    if chance < 0.6:
        return w.name()
    if chance < 0.8:
        return "".join(r.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=r.randint(2, 4)))
    return f"{r.choice('BCDEFGHKMNPRSTVXZ')}{r.randint(1, 900)}"


def _pair(w: Words) -> str:
    return f"{w.rng.choice(ADJECTIVES)} {_thing(w)}" if w.rng.random() < 0.5 else w.phrase(2)


def _title(w: Words) -> str:
    r = w.rng
    return title_case(filled(w, r.choice(TITLE_FORMS)))


UNMARKED = (
    "Makefile LICENSE passwd fstab Dockerfile crontab CHANGELOG sudoers hostname exports mtab "
    "known_hosts authorized_keys Jenkinsfile Vagrantfile Gemfile INSTALL NEWS COPYING VERSION "
    ".vimrc .zshrc .npmrc .bashrc .gitignore .env resolv.conf motd TODO AUTHORS config profile "
    "group services .profile Procfile"
).split()
"""File names without an extension, or with nothing else."""


def _file(w: Words) -> str:
    r = w.rng
    name = r.choice(
        (
            _thing(w).replace(" ", "_"),
            w.made_up(),
            f"{w.made_up()}-{r.randint(1, 99)}",
            f"{w.noun()}_{w.noun()}",
            w.noun().upper(),
            w.noun().capitalize(),
        )
    )
    if r.random() < 0.18:
        name = r.choice((*UNMARKED, name))
        return f"{_dir(w)}/{name}" if r.random() < 0.6 else name
    name += "." + r.choice(
        "txt md py pdf docx csv json log yaml html rs c jpg png xlsx toml sh zip bak js".split()
    )
    return f"{_dir(w)}/{name}" if r.random() < 0.3 else name


def _dir(w: Words) -> str:
    r = w.rng
    parts = [
        r.choice(("src", "home", "docs", "tests", "var", "lib", w.noun(), w.made_up()))
        for _ in range(r.randint(1, 3))
    ]
    return r.choice(("", "/", "", "~/", "./")) + "/".join(p.replace(" ", "_") for p in parts)


def _folder(w: Words) -> str:
    return (
        _dir(w) + ("/" if w.rng.random() < 0.15 else "")
        if w.rng.random() < 0.6
        else w.rng.choice(
            ("Downloads", "Documents", "Pictures", "Desktop", "Music", w.noun(), w.name())
        )
    )


def _bare_file(w: Words) -> str:
    """Return a file without an extension, which only the question distinguishes from a folder."""
    return f"{_dir(w)}/{w.rng.choice((w.made_up(), w.noun(), w.noun().upper()))}".replace(" ", "_")


def _image(w: Words) -> str:
    return (
        _file(w).rsplit(".", 1)[0]
        + "."
        + w.rng.choice(("jpg", "png", "gif", "webp", "jpeg", "bmp"))
    )


def _url(w: Words) -> str:
    r = w.rng
    host = f"{r.choice(('', 'www.', 'docs.', 'news.', 'blog.'))}{r.choice((w.made_up(), w.noun()))}"
    host += "." + r.choice(("com", "org", "net", "io", "de", "dev", "example"))
    path = r.choice(
        (
            "",
            "",
            "/",
            f"/{w.noun()}",
            f"/{w.noun()}/{w.made_up()}",
            f"/{w.made_up()}?q={r.randint(1, 99)}",
        )
    )
    return r.choice(("", "https://", "http://", "")) + host + path


def identifier(w: Words) -> str:
    """Return an id of digits or letters, with or without separators."""
    r = w.rng
    letters = "".join(r.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=r.randint(1, 3)))
    number = str(r.randint(1, 10 ** r.randint(1, 6)))
    return r.choice(
        (
            number,
            number,
            w.code(),
            letters + number,
            f"{letters}-{number}",
            "".join(r.choices("abcdef0123456789", k=r.randint(4, 8))),
            f"{letters}-{r.randint(2020, 2030)}-{number}",
            f"#{number}",
            f"{letters}_{number}",
        )
    )


def _address(w: Words) -> str:
    r = w.rng
    street = r.choice((w.name(), r.choice(LAST), "Elm", "Oak", "Harbour", "Main", "Park", "Church"))
    kind = r.choice(("Street", "Road", "Avenue", "Lane", "Square"))
    number = r.randint(1, 300)
    return r.choice((f"{number} {street} {kind}", f"{street} {kind} {number}"))


def place(w: Words) -> str:
    """Return a place on the map."""
    chance = w.rng.random()
    if chance < 0.45:
        return w.rng.choice(LISTS["landmark"])
    if chance < 0.6:
        return _address(w)
    return (
        city(w)
        if chance < 0.85
        else f"{w.rng.choice(('Hotel', 'Café', 'Lake', 'Mount', 'Castle'))} {w.name()}"
    )


def _user(w: Words) -> str:
    r = w.rng
    return r.choice(
        (
            w.made_up(),
            f"{w.made_up()}{r.randint(1, 99)}",
            r.choice(FIRST).lower(),
            f"{w.made_up()}_{w.made_up()}",
            f"{r.choice(FIRST).lower()}.{r.choice(LAST).lower()}",
        )
    )


def _host(w: Words) -> str:
    r = w.rng
    return r.choice(
        (
            f"{w.made_up()}.{r.choice(('com', 'org', 'local', 'net'))}",
            f"10.0.{r.randint(0, 255)}.{r.randint(1, 254)}",
            f"{r.choice(('web', 'db', 'app', 'node', 'gpu'))}{r.randint(1, 20)}",
            f"{r.choice(('web', 'db', 'prod'))}-{w.made_up()}",
            "localhost",
        )
    )


def _bare(w: Words) -> str:
    form = w.rng.choice(THINGS)
    return filled(w, form).removeprefix("the ").removeprefix("my ")


def _branch(w: Words) -> str:
    dashed = f"{w.noun()}-{w.noun()}"
    return w.rng.choice((w.made_up(), dashed, f"fix/{w.noun()}", f"feature/{w.made_up()}"))


def _version(w: Words) -> str:
    r = w.rng
    last = r.choice(("", f".{r.randint(0, 9)}"))
    return f"{r.choice(('', 'v'))}{r.randint(0, 9)}.{r.randint(0, 20)}{last}"


KINDS: dict[str, Callable[[Words], str]] = {
    "city": city,
    "place": place,
    "country": lambda w: w.rng.choice(COUNTRIES) if w.rng.random() < 0.8 else w.name(),
    "person": person,
    "person_name": person_name,
    "first_name": first_name,
    "person_or_email": lambda w: email(w) if w.rng.random() < 0.25 else person(w),
    "email": email,
    "phone": phone,
    "day": day,
    "time": clock,
    "text": _one(CLAUSES),
    "topic": lambda w: w.phrase() if w.rng.random() < 0.2 else filled(w, w.rng.choice(TOPICS)),
    "howto_said": lambda w: "how to " + filled(w, w.rng.choice(HOWTO)),
    "howto": lambda w: filled(w, w.rng.choice(HOWTO)),
    "task": _one(TASKS),
    "thing": _one(THINGS),
    "bare": _bare,
    "task_or_bare": lambda w: _bare(w) if w.rng.random() < 0.5 else filled(w, w.rng.choice(TASKS)),
    "event": lambda w: w.phrase(2) if w.rng.random() < 0.15 else filled(w, w.rng.choice(EVENTS)),
    "sentence": _one(SENTENCES),
    "phrase_text": lambda w: (
        w.phrase() if w.rng.random() < 0.15 else filled(w, w.rng.choice(PHRASES))
    ),
    "title": lambda w: w.rng.choice(LISTS["movie"]) if w.rng.random() < 0.4 else _title(w),
    "artist": lambda w: w.rng.choice(LISTS["artist"]) if w.rng.random() < 0.5 else person_name(w),
    "restaurant": lambda w: (
        w.rng.choice(LISTS["restaurant_name"])
        if w.rng.random() < 0.45
        else w.rng.choice((_title(w), w.name(), f"{w.name()} {w.name()}", f"Chez {w.name()}"))
    ),
    "company": lambda w: w.rng.choice(LISTS["company_name"]) if w.rng.random() < 0.5 else w.name(),
    "station": lambda w: (
        w.rng.choice(LISTS["station_name"])
        if w.rng.random() < 0.4
        else w.rng.choice((city(w), f"{w.name()} {w.rng.choice(('Station', 'Central', 'North'))}"))
    ),
    "food": _listed("food", _one(FOODS), 0.35),
    "ingredient": _listed("ingredient", lambda w: w.made_up(), 0.15),
    "ate": _listed("ate", _one(MEALS), 0.45),
    "product": _listed(
        "product",
        lambda w: _pair(w) if w.rng.random() < 0.4 else filled(w, w.rng.choice(PRODUCTS)),
        0.4,
    ),
    "symbol": lambda w: "".join(w.rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=w.rng.randint(2, 5))),
    "money": lambda w: "",
    "file": _file,
    "bare_file": _bare_file,
    "dir": _folder,
    "path": _dir,
    "file_or_dir": lambda w: _file(w) if w.rng.random() < 0.55 else _folder(w),
    "image": _image,
    "url": _url,
    "id": identifier,
    "address": _address,
    "user": _user,
    "host": _host,
    "service": _listed("service", lambda w: w.rng.choice((w.made_up(), f"{w.noun()}-{w.noun()}"))),
    "branch": _branch,
    "version": _version,
    "word": _listed("word", lambda w: w.noun(), 0.5),
    "rare_word": _listed("rare_word", lambda w: w.made_up(), 0.4),
    "bug": _listed("bug", _one(BUGS), 0.55),
    "commit": _listed("commit", _one(COMMITS), 0.55),
    "label": _listed("label", lambda w: w.phrase(2)),
    "reason": _listed("reason", _one(REASONS), 0.55),
    "meeting_room": _listed("meeting_room", lambda w: w.name()),
    "document": _listed("document", _file, 0.4),
    "doctor": _listed("doctor", lambda w: w.made_up(), 0.1),
    "poll": lambda w: filled(
        w,
        w.rng.choice(
            (
                "where do we go",
                "what do we eat",
                "when do we meet",
                "which {x} do we take",
                "who brings the {x}",
                "what is the best {x}",
                "when is the {x}",
                "which {z} is better",
            )
        ),
    ),
    "option": _listed("option", lambda w: w.noun(), 0.4),
}
for _kind in LISTS:
    KINDS.setdefault(_kind, _listed(_kind, lambda w: w.noun(), 0.12))

NOUN_KINDS = frozenset(
    "text topic howto howto_said task thing bare task_or_bare sentence phrase_text reason bug "
    "commit sql event title food product ate".split()
)
"""Kinds after which a further word would be read as a part of the value."""

ABOUT = {
    "city": (
        "name of the city",
        "The city and state, e.g. San Francisco, CA",
        "where",
        "city name",
        "e.g. Paris",
    ),
    "day": ("which day", "the date", "YYYY-MM-DD or a weekday", "day, e.g. tomorrow"),
    "time": ("time of day", "when", "HH:MM", "the time, e.g. 8 pm"),
    "person": ("who", "name of the person", "a contact's name"),
    "text": ("the text", "what to say", "content of the message"),
    "topic": ("what it is about", "the search terms", "keywords"),
    "id": ("the id", "its number", "identifier, e.g. A-17"),
    "money": ("how much", "the amount of money"),
}


def integer(rng: random.Random, low: int, high: int) -> tuple[int, str]:
    """Return a whole number and its phrase."""
    n = rng.randint(low, high)
    if rng.random() < 0.3:
        n = rng.choice(
            [x for x in (1, 2, 3, 4, 5, 10, 15, 20, 25, 30, 50, 100, 200, 500) if low <= x <= high]
            or [n]
        )
    if rng.random() < 0.3 and n <= 999:
        words = number_words(n)
        return n, words.replace("-", " ") if rng.random() < 0.2 else words
    return n, str(n)


def decimal(rng: random.Random, low: int, high: int) -> tuple[int | float, str]:
    """Return a number with or without decimals, and its phrase."""
    if rng.random() < 0.6:
        return integer(rng, low, high)
    value = round(rng.uniform(low, high), rng.randint(1, 2))
    return (int(value), str(int(value))) if value == int(value) else (value, str(value))
