"""How people ask: the wordings of the training text, by what is asked.

`(a|b|)` stands for any one of its alternatives, `{c}` for a value. Chinese wordings are under the same keys with
`_zh`. The wordings that training never sees are in demo_heldout.py, under the same keys.
"""

QUESTIONS: dict[str, list[str]] = {
    # ---- countries -------------------------------------------------------------------------------------------------
    "capital": [
        "(What is|What's|What was|Which is) the (capital|capital|capital city) of {c}?",
        "(Tell me|Give me|Name|Say|Show me|Find) the (capital|capital city) of {c}.",
        "(Can|Could|Would) you (tell me|name|say|give me) the (capital|capital city) of {c}?",
        "Do you know (the capital of {c}|what the capital of {c} is|{c}'s capital)?",
        "(I want|I need|I would like|I'd like) to know (the capital of {c}|what the capital of {c} is|{c}'s capital).",
        "(Which|What) (city|town) is (the capital of {c}|the capital city of {c}|{c}'s capital)?", "(the |)capital( city|) (of|of|for|in) {c}",
        "capital {c}", "{c} capital( city|)", "{c}: (what is the |)capital?", "{c}, capital",
        "(What is|What's|Tell me|Name) {c}'s capital( city|)?", "The capital of {c}(| is| is called|?)",
        "What is the (name of the capital|capital's name) of {c}?", "(Which|What) capital does {c} have?",
        "(What|How) is the capital of {c} called?", "What do you call the capital of {c}?", "{c} has which capital?",
        "the capital of {c} is (what|which city)?", "In {c}, (what|which city) is the capital?", "Tell me (what|which city) the capital of {c} is.",
        "I forgot the capital of {c}.", "My (friend|teacher|son) asks (for|me) the capital of {c}.", "Name {c}'s (seat of government|capital)?",
        "The (capital|capital city) of {c}, (what is it|what's that|which one is it|please)?", "What capital (belongs to|goes with|has) {c}?",
        "I (can't remember|don't remember|don't know|always forget) the capital of {c}.", "{c} (has|have) what (city as |)(a |)capital?",
        "If {c} is the country, what is the capital?", "(Where is|What is) the seat of government of {c}?", "whats the capital of {c}"],
    "capital_zh": [
        "{c}的首都(是哪里|是什么|是哪个城市|在哪里|叫什么|是哪儿|是|呢|在哪儿|在哪|是哪座城市)？", "(请告诉我|告诉我|请问|说说|我想知道|你知道){c}的首都(|是哪里|是什么|在哪里|叫什么|吗)。",
        "(哪个城市|哪座城市|哪里|什么城市)是{c}的首都？", "{c}首都(|是哪|是哪里|在哪|叫什么)？", "{c}的首都", "首都：{c}", "{c}，首都是哪里？", "(说出|写出|给出){c}的首都。", "{c}是哪座城市当首都？",
        "{c}把首都设在哪里？", "(查一下|帮我查|说说看，)({c}首都|{c}的首都)(。|？)", "我忘了{c}的首都。", "{c}的首府是哪里？"],
    "more": [
        "(And|and) (|of |for |in ){c}?", "(What|How) about {c}?", "(And|And what about|And how about) {c}?",
        "(Now|Next:|Also|The same for|Same for) {c}", "{c}?", "And that of {c}?", "OK, and {c}?"],
    "more_zh": ["那{c}呢？", "{c}呢？", "(还有|那么){c}(呢|)？", "{c}？", "那{c}的呢？"],
    "capital_of": [
        "(What country is {v} the capital of|{v} is the capital of (which|what) country|{v} is the capital of (what|where))?",
        "Of (which|what) country is {v} the capital?", "(Which|What) country has (the capital {v}|{v} as (its|the) capital|{v} for a capital)?",
        "(Which|What) country's capital is {v}?", "Whose capital is {v}?", "{v} is (which|what) country's capital?", "{v} is the capital of",
        "(Tell me|Name) the country (whose capital is {v}|with the capital {v}|that has {v} as its capital).",
        "(Which|What) nation has its capital in {v}?", "To (which|what) country does the capital {v} belong?",
        "The capital {v} belongs to (which|what) country?", "{v}: capital of (what|which country)?", "{v} is a capital. Of (what|which country)?",
        "Where is {v} the capital?", "(Which|What) country is governed from {v}?", "{v} capital of"],
    "capital_of_zh": [
        "{v}是(哪个国家|哪国|什么国家|谁)的首都？", "(哪个国家|哪国|什么国家)的首都是{v}？", "(哪个国家|哪国)以{v}为首都？", "首都是{v}的(是哪个国家|国家是哪个|国家)？", "{v}是哪里的首都？", "{v}是首都，(是|)哪个国家的？",
        "{v}，(哪国|哪个国家)首都？"],
    "where_city": [
        "Where is {v}?", "(In|Inside) (which|what) country is {v}( located|)?", "(Which|What) country is {v} in?",
        "{v} is in (which|what) country?", "Where (do I find|can I find|is|lies) {v}?", "(Which|What) country is {v} (located in|part of)?",
        "{v} lies in (which|what) country?", "Where in the world is {v}?", "{v} (is|lies) where?",
        "{v}, (what|which) country(| is that| is it in)?", "country of {v}", "(Which|What) country does {v} (belong to|lie in)?",
        "What country has the city (of |){v}?", "The city of {v} is in( which country|)?", "where's {v}"],
    "where_city_zh": [
        "{v}在(哪个国家|哪里|哪儿|哪国|什么国家)？", "{v}位于(哪个国家|哪里|哪国)？", "{v}(是哪个国家的|属于哪个国家)？", "{v}这座城市在哪个国家？", "{v}(是|)哪国(的|)(城市|)？"],
    "continent": [
        "(On|In) (which|what) continent (is|lies) {c}?", "(Which|What) continent is {c} (on|in|part of|located on|located in|situated in)?",
        "Where is {c}( located| situated|)?", "(Which|What) continent does {c} (belong to|lie on|lie in)?",
        "In (what|which) part of the world is {c}?", "{c} is (on|in) (which|what) continent?", "{c} continent", "continent of {c}",
        "(Tell me|Name|What is|What's) the continent (of|for) {c}.",
        "(Tell me|Do you know) (where {c} is|which continent {c} is on|what continent {c} is in).", "{c}: which continent?",
        "Where (can I find|do I find|would I find) {c} on (a|the) map?", "To (which|what) continent does {c} belong?",
        "{c} (is located|lies) where?", "What's {c}'s continent?", "Where on (earth|the globe|the planet) is {c}?", "Where does {c} lie?",
        "{c} is (on|in|part of) the continent (of|called)?", "Is {c} in (Europe or Asia|Africa or Asia|Europe, Asia or Africa)?",
        "whereabouts in the world is {c}?", "where's {c}"],
    "continent_zh": [
        "{c}在(哪个洲|哪个大洲|哪里|哪一个洲|什么洲|哪儿|哪一洲)？", "{c}(位于|属于)(哪个洲|哪个大洲|什么洲|哪里)？", "{c}是(哪个洲|哪个大洲|什么洲)的(国家|)？", "(请告诉我|告诉我|你知道){c}在(哪个洲|哪里)(|吗)。",
        "{c}的大洲", "{c}处在哪个洲？", "{c}是(亚洲|欧洲|非洲)的还是别处的？", "{c}(坐落在|处于)(哪里|哪个大洲)？"],
    "language": [
        "(What|Which) language(s|) (is|are) spoken in {c}?", "(What|Which) language(s|) do (people|they|the people) (speak|use) in {c}?",
        "What do (people|they|the people) speak in {c}?", "(What is|What's|Tell me|Name) the (|main |official |national )language of {c}.",
        "(What|Which) (language|tongue) do (people|the people) (in|of|from) {c} speak?", "What do people (in|of|from) {c} speak?",
        "{c}('s|) language", "language (of|in|spoken in) {c}", "(What|Which) is the (official|main|national) language (of|in) {c}?",
        "(What|Which) official language(s|) does {c} have?", "How do people (speak|talk) in {c}?",
        "(Do you know|Tell me|I want to know) (what|which) language (is spoken|people speak|they speak) in {c}.",
        "In {c} people speak (what|which language)?", "What's {c}'s (official |)language?", "If I go to {c}, (what|which) language will I hear?",
        "Which language should I learn (for|before going to|to live in) {c}?", "{c}: what language?", "What do they speak (in|over in) {c}?",
        "(Which|What) language (is common|do most people speak|is official) in {c}?", "How do {c}'s people talk?",
        "(Which|What) language does {c} (use|speak|have)?", "Mother tongue of people in {c}?",
        "I am going to {c}, (what|which) language do they speak( there|)?", "(What|Which) tongue is used in {c}?"],
    "language_zh": [
        "{c}(人|)说(什么语言|什么话|哪种语言|什么语|啥语言)？", "{c}的(官方语言|语言|主要语言|国语|母语)(是什么|是哪种|是|有哪些|)？", "(在|){c}(讲|说|用|使用)(什么语言|什么话|哪种语言|什么语)？",
        "(请告诉我|我想知道|告诉我)(在|){c}(人|)说什么语言。", "{c}的人(讲|说)什么(话|语言)？", "{c}通行什么语言？", "在{c}要说什么(话|语言)？", "{c}(人|)平时(说|讲)什么(话|语言)？",
        "{c}官方用(什么语|什么语言|哪种语言)？"],
    "currency": [
        "(What is|What's|Tell me|Name) the (|official |national )(currency|money) of {c}.",
        "(What|Which) (currency|money) (is used|do people use|do they use|do you use|is accepted) in {c}?",
        "(What|Which) (currency|money) does {c} (use|have)?", "(How|With what|In what currency) (do|can) (people|I|you|we) pay in {c}?",
        "What is the (money|currency) (in|of|used in) {c}( called|)?", "currency (of|in|for) {c}", "{c}('s|) (currency|money)",
        "(What is|What's) {c}'s (|official )(currency|money)?",
        "(What|Which) (money|coins|notes|cash|banknotes) (do I need|should I take|do people use|do they use|are used|will I need) in {c}?",
        "What do (people|you) pay with in {c}?",
        "(Do you know|I want to know|Tell me) (what|which) (currency|money) (is used|people use|they use|they have) in {c}.", "{c}: what currency?",
        "What kind of (money|currency) do they (have|use) in {c}?", "People in {c} pay with what?",
        "(What|Which) (currency|money) is (legal|valid|common) in {c}?", "What are prices in {c} (given|written|paid) in?",
        "I am going to {c}, (what|which) (money|currency) (do I bring|do they use|is used)?", "How do I pay in {c}?",
        "(What's|What is) the money called (in|of) {c}?", "Money of {c}?"],
    "currency_zh": [
        "{c}的(货币|钱|法定货币|币种)(是什么|叫什么|是|是哪种|)？", "{c}(用|使用|流通)(什么货币|哪种货币|什么钱|什么币|啥钱)？", "在{c}(用什么钱|怎么付钱|用什么付款|用什么货币|花什么钱)？",
        "(请告诉我|我想知道|告诉我){c}用什么货币。", "{c}人用什么(钱|货币)？", "去{c}(要|应该)带什么(钱|货币)？", "{c}(买东西|购物)(用|花)什么钱？", "{c}的钱叫什么？", "到了{c}(用|花)什么(货币|钱)？",
        "{c}(发行|流通)(什么|哪种)货币？"],
    "about": [
        "(Tell me|Say|Tell us) (something |a little |a bit |more |)about {c}.", "(What|What all) do you know about {c}?",
        "(What|Which) (facts|things) do you know about {c}?", "(Give me|List) (some |the |a few |)facts (about|on) {c}.", "Describe {c}.", "{c}",
        "What (is|about) {c}?", "(I want|I would like|I'd like) to (know|learn|hear) (something |more |)about {c}.",
        "Can you tell me (something |)about {c}?", "{c} (facts|info|information)", "Do you know {c}?", "Explain {c}.",
        "What (can|could) you tell me (about|of) {c}?", "Facts: {c}", "Some words (about|on) {c}(, please|).",
        "I (like|love|miss) {c}, tell me about it.", "Teach me (something |)about {c}.", "What should I know about {c}?", "Introduce {c} to me."],
    "about_zh": [
        "(介绍一下|介绍|说说|讲讲|谈谈){c}(|吧|。)", "(告诉我|说|讲)一些(关于|){c}的(事|知识|事情|信息|情况)。", "你(知道|了解){c}(的什么|吗|什么)？", "{c}", "(关于|有关){c}你知道什么？",
        "{c}是什么(国家|样的国家|)？", "{c}怎么样？", "给我(讲讲|说说|介绍){c}。", "我想(了解|知道|认识){c}。", "{c}简介", "{c}有哪些基本情况？"],
    "yes_capital": [
        "Is {v} the capital( city|) of {c}?", "Is {v} {c}'s capital( city|)?",
        "(Is it true that|Am I right that|True or false:|Is it right that) {v} is the capital of {c}?",
        "{v} is the capital of {c}, (right|isn't it|yes|true|no)?", "Is the capital of {c} {v}?", "{c}'s capital is {v}, (right|isn't it|correct)?",
        "Does {c} have the capital {v}?", "{v} is {c}'s capital?", "I think {v} is the capital of {c}. (Right|Correct|True)?",
        "Yes or no: (is |){v} (is |)the capital of {c}?"],
    "yes_capital_zh": [
        "{v}是{c}的首都吗？", "{c}的首都是{v}吗？", "{v}是不是{c}的首都？", "{c}的首都是不是{v}？", "{v}是{c}的首都，对吗？", "{c}的首都，是{v}吗？", "{v}就是{c}的首都吧？", "{v}是{c}首都，是不是？"],
    "yes_continent": [
        "Is {c} (in|on|part of|located in|a part of) {v}?", "Does {c} (lie in|belong to) {v}?",
        "(Is it true that|Am I right that|True or false:) {c} is in {v}?", "{c} is in {v}, (right|isn't it|yes|true|correct)?",
        "Is {c} (a|an) {j} country?", "Is {c} a country in {v}?", "Can I find {c} in {v}?", "Yes or no: (is |){c} in {v}?", "{c}, is it in {v}?",
        "I think {c} is in {v}. (Right|Correct|True)?", "Is {c} one of the countries of {v}?", "{v} is where {c} is?", "Do you find {c} in {v}?"],
    "yes_continent_zh": [
        "{c}在{v}吗？", "{c}是不是在{v}？", "{c}(位于|属于){v}吗？", "{c}在{v}，对吗？", "{c}是{v}的国家吗？", "{c}在不在{v}？", "{c}是{v}国家吧？", "{v}有{c}这个国家吗？", "{c}算不算{v}国家？"],
    "yes_language": [
        "(Do (people|they)|Do the people) (speak|use) {v} in {c}?", "Is {v} (spoken|used|an official language|the language) in {c}?",
        "Do people (in|from) {c} speak {v}?", "(Is it true that|True or false:) people in {c} speak {v}?",
        "They speak {v} in {c}, (right|don't they|yes)?", "Is {v} (a|the|an official) language of {c}?", "Yes or no: do people in {c} speak {v}?",
        "Can I speak {v} in {c}?", "{v} in {c}, do people speak it?", "I think they speak {v} in {c}. (Right|Correct|True)?",
        "Will people in {c} understand {v}?"],
    "yes_language_zh": [
        "{c}人说{v}吗？", "(在|){c}(说|讲|用){v}吗？", "{c}人(说|讲)不(说|讲){v}？", "{v}是{c}的(官方|)语言吗？", "{c}的语言是{v}吗？", "{c}的人会说{v}吗？", "{c}通用{v}吗？",
        "{c}人讲的是{v}吧？"],
    "yes_currency": [
        "Does {c} use the {v}?", "Is the {v} (used|the currency|the money) in {c}?", "Is the {v} the currency of {c}?",
        "Can (I|you|we) pay with the {v} in {c}?", "Do (people|they) (use|pay with) the {v} in {c}?",
        "(Is it true that|True or false:) {c} uses the {v}?", "Yes or no: does {c} use the {v}?", "Is {c}'s currency the {v}?",
        "In {c}, do you pay with the {v}?", "I think {c} has the {v}. (Right|Correct|True)?"],
    "yes_currency_zh": [
        "{c}用{v}吗？", "{c}的货币是{v}吗？", "{c}(使用|是不是用){v}吗？", "在{c}可以用{v}吗？", "{v}是{c}的货币吗？", "{c}人花{v}吗？", "{c}的钱是{v}吧？", "{c}用的是不是{v}？"],
    "name_country": [
        "(Name|Tell me|Give me|Say|Pick|List|Find me) (a|one|any|some) country (in|from|of|on) {v}.", "(Which|What) country is in {v}?",
        "(What is|What's) (a|one) country in {v}?", "(Do you know|Can you name|Could you name) (a|one|any) country in {v}?",
        "An example of a country in {v}", "a country in {v}", "(Tell me|Give me|Name) (a|an) {j} country.", "I need a country in {v}.",
        "Any country in {v}(, please|)?", "One country (of|in) {v}(, please|)?", "(Some|Any) {j} country?", "What country is {j}?",
        "Mention a country (of|from) {v}."],
    "name_country_zh": [
        "(说出|说|举出|告诉我|列出|写出|给出)(一个|){v}(的|)国家。", "{v}有(什么国家|哪个国家)？", "(举|说)一个{v}国家的例子。", "哪个国家在{v}？", "请(说|说出)一个在{v}的国家。", "随便(说|举)一个{v}国家。",
        "我要一个{v}国家。", "{v}(的|)一个国家"],
    "name_countries": [
        "(Name|Tell me|Give me|List) (three|3|some|a few) countries (in|from|of|on) {v}.", "(Which|What) countries are (there |)in {v}?",
        "(Do you know|Can you name) (three|some) countries in {v}?", "countries in {v}", "three {j} countries", "list countries in {v}",
        "I need three countries in {v}.", "Three countries (of|from) {v}(, please|)?", "(Some|A few|Three) {j} (countries|states)?",
        "What are some countries in {v}?"],
    "name_countries_zh": [
        "(说出|举出|列出|告诉我)(三个|几个|一些){v}(的|)国家。", "{v}有(哪些|哪几个|什么)国家？", "{v}的国家有哪些？", "(列|写|数)几个{v}国家。", "我要三个{v}国家。"],
    "speaks": [
        "(Where|In which country) (do people speak|is|can you hear|do they speak) {v}( spoken|)?", "(Which|What) country speaks {v}?",
        "(Which|What) country has the (official |)language {v}?", "In (which|what) country do (people|they) speak {v}?", "Who speaks {v}?",
        "(Name|Tell me) a country where {v} is spoken.", "{v} is the language of (which|what) country?", "{v} is spoken where?",
        "Where is {v} the language?", "In what place do they talk {v}?", "(Which|What) people speak {v}?"],
    "speaks_zh": [
        "(哪个国家|哪国|哪里|哪儿)(的|)(人|)说{v}？", "在(哪个国家|哪里)说{v}？", "谁说{v}？", "{v}是(哪个国家|哪里|哪国)的语言？", "{v}在哪里通行？", "{v}是谁的语言？", "哪些地方(讲|说|用){v}？"],
    "uses": [
        "(Where|In which country) (do people|do they|can I) (use|pay with|pay in) the {v}?", "(Which|What) country (uses|has) the {v}?",
        "(Whose|Which country's) (currency|money) is the {v}?", "In (which|what) country is the {v} (used|the currency)?",
        "the {v} is the currency of which country?", "(Name|Tell me) a country that uses the {v}.", "Where can I pay with the {v}?",
        "The {v} is used where?", "The {v} is the money of (which|what) country?", "(Which|What) people pay with the {v}?"],
    "uses_zh": [
        "(哪个国家|哪国|哪里|谁)(用|使用){v}？", "{v}是(哪个国家|哪里|哪国)的(货币|钱)？", "(在|)(哪个国家|哪里)可以用{v}？", "{v}在哪里用？", "花{v}的是哪个国家？", "{v}是什么地方的钱？"],
    # ---- sums ------------------------------------------------------------------------------------------------------
    "add": [
        "(What is|What's|How much is|Calculate|Compute|Solve|Tell me|Work out|whats|) {a} + {b}?", "{a} + {b}( =|= ?| = ?|)", "{a}+{b}(=|=?|)",
        "(What is|What's|How much is|Calculate|Compute|) {a}+{b}?",
        "(What is|What's|How much is|Calculate|Compute|Tell me|) {a} (plus|plus|and|added to) {b}?",
        "(Add|Sum|Please add|Can you add|Could you add) {a} (and|to|plus|with) {b}.",
        "(What is|What's|Tell me|Give me|Find|) the (sum|total) of {a} and {b}?", "{a} plus {b} (is|equals|makes|gives)( what|)?",
        "(What do|What does) {a} (plus|and) {b} (make|give|equal)?", "How much do {a} and {b} make?",
        "(Can|Could) you (calculate|compute|solve|add) {a} + {b}?", "{a} and {b} together?", "Increase {a} by {b}.", "{b} more than {a}",
        "{a} and then {b} more(| is|, how much is that)?", "(The |){a} increased by {b}?", "Count {b} (up|on) from {a}.",
        "{b} on top of {a}?", "How much is {a} with {b} added?", "Sum: {a}, {b}", "{a} ＋ {b}",
        "Begin (with|at) {a} and add {b}.", "What (number|result) (is|comes from) {a} + {b}?", "{a} + {b} equals (what|how much)?"],
    "add_zh": [
        "{a}( |)(加|加上|+|＋)( |){b}(等于多少|是多少|等于几|=|等于|是几|得多少|)？", "(计算|算一下|请算|算算|求){a}( |)(加|+)( |){b}。", "{a}(和|与|跟){b}(的和|相加|加起来)(是多少|等于多少|是几)？",
        "{a}再加{b}(是多少|等于几|)？", "{a}、{b}(相加|加在一起)(得|是|等于)多少？", "把{a}和{b}加起来。", "{a}多{b}是多少？"],
    "subtract": [
        "(What is|What's|How much is|Calculate|Compute|Solve|Tell me|Work out|whats|) {a} - {b}?", "{a} - {b}( =|= ?| = ?|)", "{a}-{b}(=|=?|)",
        "(What is|What's|How much is|Calculate|Compute|) {a}-{b}?",
        "(What is|What's|How much is|Calculate|Compute|Tell me|) {a} (minus|minus|less|take away) {b}?",
        "(Subtract|Take|Please subtract|Can you subtract|Deduct) {b} from {a}.", "Take {b} away from {a}.",
        "(What is|What's|Tell me|Find|) the difference (between|of) {a} and {b}?", "{a} minus {b} (is|equals|makes|gives)( what|)?",
        "What does {a} minus {b} (make|give|equal)?", "(Can|Could) you (calculate|compute|solve) {a} - {b}?", "Decrease {a} by {b}.",
        "{b} less than {a}", "{a} − {b}", "{a} without {b}(, how much is it|)?", "{a} reduced by {b}?", "{a} less {b} (is|makes)?",
        "Count {b} (down|back) from {a}.", "What (remains|is left) of {a} (after|when I take away) {b}?",
        "How much is left (of {a} |)(when|if) {b} (is taken|are taken|goes away) from {a}?", "How much (more|larger) is {a} than {b}?",
        "Begin (with|at) {a} and take away {b}.", "What (number|result) (is|comes from) {a} - {b}?", "{a} - {b} equals (what|how much)?",
        "Start with {a} and (take {b} away|take away {b}|remove {b}|lose {b}|go {b} down).", "(What is |What's |){b} less than {a}?",
        "{a}, (take away|minus|less|remove|drop) {b}?", "From {a} (remove|cut|drop|deduct|I take) {b}.", "How (far|much) is it from {b} to {a}?",
        "{b} (off|out of|away from) {a}?", "(Lower|Reduce|Cut) {a} by {b}.", "{a} but {b} (less|fewer|smaller)?",
        "(What|How much) do I get if I take {b} from {a}?", "How much less is {b} than {a}?", "{b} (taken|subtracted) from {a}?",
        "(I have|We had) {a} and (spend|lose|use) {b}, (what|how much) is left?", "Go back {b} from {a}.", "What must I add to {b} to get {a}?"],
    "subtract_zh": [
        "{a}( |)(减|减去|-|－)( |){b}(等于多少|是多少|等于几|=|等于|是几|得多少|)？", "(计算|算一下|请算|算算|求){a}( |)(减|-)( |){b}。", "{a}(和|与){b}的差(是多少|等于多少|是几)？",
        "从{a}(减去|减掉){b}(等于多少|是多少|还剩多少)？", "{a}去掉{b}(还剩多少|是多少|剩几)？", "{a}比{b}(多|大)多少？", "{a}少{b}是多少？", "把{a}减去{b}。",
        "比{a}少{b}的数是(多少|几)？", "{a}拿走{b}(剩多少|还有多少|剩几)？", "{a}里(去掉|拿掉|扣掉){b}。", "{a}扣{b}(是多少|等于几|)？", "{b}加几等于{a}？"],
    "tale_add": [
        "I have {a} {n}(,| and) (I |)(get|buy|find|receive|am given) {b} (more|more {n}|others). How many( {n}|) (do I have|ha"
        "ve I got|are there|now)( now|)?",
        "{x} has {a} {n} and {y} has {b}. How many( {n}|) (do they have|are there|have they got)( together| in total| altogether|)?",
        "There are {a} {n} and {b} (more|others) come. How many (are there|are there now|in total)?",
        "If I have {a} {n} and (buy|get|add) {b} more, how many( {n}|) do I have?",
        "{x} had {a} {n} and (found|bought|got|won|picked) {b} more. How many( {n}|) (does {x} have|now|are there)( now|)?",
        "I (bought|ate|read|saw) {a} {n} (yesterday|on Monday) and {b} today. How many( {n}|) (in total|in all|together|is that)?",
        "{a} {n} plus {b} {n} (is|makes|are) how many( {n}|)?",
        "A box has {a} {n}. I put in {b} more. How many( {n}|) (are in the box|now|are there)?",
        "(She|He|{x}) (owns|keeps) {a} {n} and {y} (brings|adds|gives) {b} more. (How many are there|How many now|What is the total)?",
        "{a} {n} are here. {b} more (arrive|are coming). How many (now|are here)?", "First {a} {n}, then {b} more: how many?",
        "On Monday I counted {a} {n}, on Tuesday {b}. How many (is that |were there |)(in all|together|altogether)?"],
    "tale_add_zh": [
        "我有{a}个{n}，(又|再)(买了|得到|来了|拿了|捡到){b}个，(现在|)(一共|总共|)有(多少个|几个)(|{n})？", "{x}有{a}个{n}，{y}有{b}个，(他们|)(一共|总共)有(多少|几)个？",
        "(桌上|盒子里|家里)有{a}个{n}，(又放了|再加){b}个，(一共|现在)有多少个？", "原来有{a}个{n}，后来多了{b}个，(现在|)(一共|)有(多少|几)个？",
        "{x}先(买|找到|得到)了{a}个{n}，又(买|找到|得到)了{b}个，一共(多少|几)个？"],
    "tale_subtract": [
        "I have {a} {n}(,| and) (I |)(give away|lose|eat|sell|give my friend|drop) {b}( of them|). How many( {n}|) (are left|d"
        "o I have left|remain|do I still have)?",
        "{x} had {a} {n} and (lost|ate|sold|gave away|spent) {b}. How many( {n}|) (are left|does {x} have( now|)|remain)?",
        "There are {a} {n} and {b} (leave|go away|are gone|break). How many (are left|remain|stay)?",
        "If I have {a} {n} and (lose|eat|give away) {b}, how many( {n}|) (are left|do I have|remain)?",
        "A box has {a} {n}. I take out {b}. How many( {n}|) (are left|remain|are in the box)?",
        "Of {a} {n}, {b} are (gone|broken|sold). How many are (left|fine)?",
        "{x} (owns|keeps) {a} {n} and {y} takes {b}. How many (are left|remain|does {x} still have)?",
        "{a} {n} are here. {b} (leave|disappear|are sold). How many (now|are left|stay)?",
        "First {a} {n}, then {b} are gone: how many (are left|remain)?", "Out of {a} {n} I (used|gave away|lost) {b}. How many (are left|remain)?",
        "(Start with|Take) {a} {n}, (take away|remove|throw away) {b}(:|,) how many (are left|remain|stay)?",
        "{x} (starts|started) with {a} {n} and (loses|uses|lost|used) {b}. (How many are left|What is left|How many remain)?",
        "{a} {n}, {b} (fly away|run off|melt|fall down|go home). How many (are left|stay|remain)?",
        "There were {a} {n}. {b} (left|were eaten|were stolen|broke). How many (are|were) left?",
        "I need {a} {n} and have {b}. How many (more do I need|are missing)?", "{x} has {a} {n}, {y} has {b} fewer. How many has {y}?",
        "{b} of my {a} {n} are (gone|lost|broken), how many (are left|remain|are still good)?"],
    "tale_subtract_zh": [
        "我有{a}个{n}，(吃了|丢了|送了|卖了|给了朋友|用了){b}个，(还|现在|)(剩|有|剩下)(多少个|几个)(|{n})？", "{x}有{a}个{n}，(丢了|吃了|卖了){b}个，还(剩|有)(多少|几)个？",
        "(桌上|盒子里|家里)有{a}个{n}，(拿走|拿出|坏了){b}个，还(剩|有)多少个？", "原来有{a}个{n}，后来少了{b}个，还(有|剩)(多少|几)个？", "{x}有{a}个{n}，给了{y}{b}个，还(有|剩)(多少|几)个？"],
    "beyond_sums": [
        "(What is|What's|Calculate|Compute|) {a} (times|*|x|×|multiplied by) {b}?", "{a} (*|x|×|/|÷|:|^|%) {b}", "{a}(*|x|×|/|÷|^){b}",
        "(What is|What's|Calculate|) {a} (divided by|over|to the power of|modulo) {b}?", "(Multiply|Divide) {a} by {b}.",
        "(What is|What's) the (square root|square|cube|logarithm|half|double|factorial) of {a}?", "(What is|Calculate|) {l} (+|-|plus|minus) {a}?",
        "(What is|Calculate|) {a} (+|-|plus|minus) {l}?", "{l} (+|-) {m}", "(What is|) {a} (squared|cubed)?", "(What is|) {a} (percent|%) of {b}?",
        "(What is|) {d} (+|-|plus|minus) {e}?", "Is {a} a prime number?", "{a} (+|-) {b} (+|-|*) {f}", "sqrt({a})",
        "(How much is|Tell me) {a} (times|divided by|multiplied with) {b}?", "The product of {a} and {b}?", "{a} shared (by|between) {b}?",
        "(How many times|How often) (does|goes) {b} (fit |)into {a}?", "{d} (+|-|*|/) {a}", "Solve x + {a} = {b}.",
        "The average of {a}, {b} and {f}?", "{b} times as (much|many) as {a}?", "Double {a}.", "Half of {a}"],
    "beyond_sums_zh": [
        "{a}(乘|乘以|除以|×|÷|*|/|除){b}(等于多少|是多少|等于几|)？", "{l}(加|减|+|-){m}(等于多少|是多少)？", "{a}的(平方|平方根|一半|立方)是多少？", "{d}加{e}等于多少？", "{a}的{b}倍是多少？",
        "(算算|求|计算){a}(乘|除以|×|÷){b}。", "{a}、{b}和{f}的平均数是多少？", "{a}是质数吗？"],
    # ---- stories ---------------------------------------------------------------------------------------------------
    "story": [
        "(Tell|Write|Tell me|Write me|Give me|Make up|Invent|Read me) (a|a short|a little|a small|a nice|a funny|a bedtime|one"
        "|another|a fairy) (story|tale) about {s}.",
        "(Can|Could|Would|Will) you (please |)(tell|write|make up)( me|) a (short |little |)(story|tale) about {s}?",
        "(I want|I would like|I'd like|I wish) (to hear |to read |)a (short |)(story|tale) about {s}.",
        "(A|One|A short|a little|the) (story|tale) (about|of|on) {s}(, please|)", "story about {s}", "story: {s}", "(Tell me|Write) a {t} story.",
        "(Tell|Write) me about {s} in a story.", "{s} story", "Once upon a time there was {s}", "tell story {s}",
        "(Let's|Let us) hear a story (about|with) {s}.", "My (child|son|daughter) wants a story about {s}.",
        "Do you know (a|any) (story|tale) about {s}?", "Tell me a story (with|where there is) {s}( in it|).",
        "(Entertain me with|Let me hear|Let me read) a (story|tale) about {s}.", "a (story|tale), {s} in it",
        "(Tell|Show) (us|my kids|the children) a story about {s}.", "What (story|tale) do you know about {s}?",
        "A (bedtime |fairy |)(story|tale) for (my son|children|kids) about {s}", "{s}: a (short |)story",
        "I need a (short |)(story|tale) about {s}( for school|).", "Make (me |)a (story|tale) of {s}.",
        "Please (narrate|tell|write) the (story|tale) of {s}.", "Can {s} be in a story?"],
    "story_zh": [
        "(讲|说|写|编|给我讲|给我说|请讲|来|帮我写)(一个|个|一则|一篇|)(关于|有关){s}的(小|短|)故事(|吧|好吗)。", "(我想听|我要听|想听)(一个|)(关于|){s}的故事。",
        "(你能|能不能|可以)(给我|)讲(一个|个)(关于|){s}的故事吗？", "{s}的故事", "讲讲{s}的故事。", "(讲|写)一个{s}的故事。", "故事：{s}", "以{s}为主题(写|讲)一个故事。",
        "(写|编|讲)(个|一个)童话，(里面有|说的是|写的是){s}。", "(讲|说|写)个故事，(要有|说说|写写|讲的是){s}。", "{s}(的|)童话", "有没有(关于|){s}的故事？", "(孩子|我)想听{s}的故事。",
        "给孩子(讲|说)(个|一个)(关于|)有{s}的故事。", "用{s}(编|写)(个|一个)故事。", "{s}历险记", "我要一个故事，关于{s}。",
        "关于{s}的(小|短|)故事", "(写|来|讲)一篇(关于|){s}的(童话|小故事|短文)(|吧)。", "(给大家|给我们|给孩子们|麻烦|请)讲讲{s}的故事(|，谢谢)。", "睡前故事：{s}",
        "主角是{s}的故事(|，讲一个)。", "(能|可以|能不能)(写|编|说)(一个|个|)(关于|){s}的(小|)故事吗？", "(我想|想)听(听|)(关于|){s}的(睡前|)(故事|童话)。",
        "(随便|)(编|写|说)一(段|篇|个){s}的(小|)故事。", "{s}的小故事(有吗|，快讲)？", "从前有{s}，(接着|继续|往下)(讲|写|说)。"],
    "any_story": [
        "(Tell|Write|Tell me|Write me|Give me|Make up) (a|a short|a little|another|any) story.", "(Can|Could) you tell( me|) a story?",
        "I want to hear a story.", "A story, please.", "story", "another story", "tell me a tale", "Do you know a story?",
        "I'm bored, tell me a story.", "Entertain me.", "(Tell|Read) us a (bedtime |)(story|tale).", "Please a story.", "Any story(, please|)?",
        "A fairy tale!", "I can't sleep, tell me a story."],
    "any_story_zh": [
        "(讲|说|给我讲|编|写)(一个|个)故事(|吧)。", "我想听故事。", "(你能|能)讲(一个|个)故事吗？", "故事", "再讲一个故事。", "来个故事。", "(编|写|说)个童话。", "我要听故事。", "来一个故事。", "给孩子讲个故事。"],
    # ---- repeating -------------------------------------------------------------------------------------------------
    "repeat": [
        "(Repeat|Say|Write|Echo|Print|Copy|Type): {w}", "(Repeat|Say|Echo|Copy) {w}", "(Repeat|Say) after me: {w}",
        "Please (say|repeat|copy) {w}", "(Say|Repeat|Write) this: {w}", "(Can|Could) you (say|repeat) {w}", "Repeat the following: {w}",
        "Say \"{w}\"", "(Repeat|Copy) exactly: {w}"],
    "repeat_zh": ["(重复|复述|跟我说|说|写|请重复|跟我念)：{w}", "(请说|请重复|重复一下){w}", "重复“{w}”"],
    # ---- what the user told (m: the value, p: a pet, r: a relative, n: a thing) ------------------------------------
    "tell_name": [
        "My name is {m}.", "My name's {m}.", "I am {m}.", "I'm {m}.", "(Please |)call me {m}.",
        "(Hello|Hi|Hey)(,|!) (my name is|I am|I'm|this is) {m}.", "You can call me {m}.",
        "My name is {m}. (Please remember it.|Remember it.|What is yours?|And you?)", "(Remember|Note) that my name is {m}.",
        "My name is {m}(, nice to meet you| and I like {n}| and I am from {k}|).", "(I am|I'm) called {m}.",
        "(People|My friends|They) call me {m}.", "The name is {m}.", "{m} is my name.", "Name: {m}", "{m} here.", "I go by {m}.",
        "(You may|Please|Just) call me {m}.", "It's {m}( here|).", "(My|The) (first |full |)name is {m}, by the way.",
        "I am {m} and I (like|have|live with) {n}.", "They named me {m}.", "Everyone (calls|knows) me (as |){m}.", "{m}, that's me.",
        "i am {m}, hi"],
    "tell_name_zh": [
        "我(叫|是|的名字叫|的名字是){m}。", "(你好|嗨|您好)(，|！)我(叫|是){m}。", "(叫我|你可以叫我|请叫我|大家叫我|朋友们叫我){m}(吧|)。", "我的名字：{m}", "我名叫{m}。", "记住，我叫{m}。", "{m}是我的名字。",
        "本人{m}。", "名字是{m}。", "我就是{m}。", "别人(都|)叫我{m}。", "我姓名{m}。", "我的大名(是|叫){m}。"],
    "fix_name": [
        "(No|Sorry|Oh|Wait), (call me|my name is|I am|it is|I meant|it's) {m}.", "(Actually|In fact)(,|) (my name is|I am|call me|it's) {m}.",
        "(From now on|Now) (call me|my name is) {m}.", "(No|Wrong), (not that|that was wrong): my name is {m}.", "I changed my name to {m}.",
        "(Please |)call me {m} instead.", "My name is {m}, not {o}.", "(Sorry|No), my name is {m}, not {o}.", "I am not {o}, I am {m}.",
        "Not {o}! (My name is |I'm |){m}.", "I (said|meant) {m}, not {o}.", "(My real name is|Really I am called|Better call me) {m}.",
        "(Oops|Ah), I am {m}( really|).", "No, {m}(!|.)"],
    "fix_name_zh": [
        "(不|不对|错了|哦不)，(叫我|我叫|我的名字是|是){m}。", "(其实|实际上)我叫{m}。", "(以后|从现在起|还是)叫我{m}吧。", "我改名叫{m}了。", "我不叫{o}，我叫{m}。", "是{m}，不是{o}。", "(真名|其实)是{m}。",
        "叫错了，我是{m}。", "我说的是{m}。", "改叫我{m}。"],
    "ask_name": [
        "(What is|What's|What was|Whats) my name( again|)?",
        "(Do|Can) you (remember|know|recall) (my name|what my name is|who I am|what I am called)?", "Who am I?", "(Can you tell|Tell) me my name.",
        "(How|What) am I called?", "What did I say my name was?", "My name is( what|)?", "(What|How) (do|should|did) you call me?",
        "What name did I (tell|give) you?", "Say my name.", "my name?", "(Have|Did) you (forgotten|forget) my name?", "How do people call me?",
        "(So |And |)what's my name(, then| now|)?", "Name me.", "What was (the name|my name) I (told|gave) you?", "Which name (is mine|do I have)?",
        "Tell me who I am.", "you remember my name?"],
    "ask_name_zh": [
        "我叫什么(名字|)？", "我的名字(是什么|叫什么|是|)？", "我是谁？", "你(记得|知道|还记得)我(叫什么|的名字|是谁|的名字叫什么)吗？", "(告诉我|说出|说说)我的名字。", "我刚才说我叫什么？", "你该叫我什么？", "怎么称呼我？",
        "我姓什么叫什么？", "说出我是谁。", "我(到底|)(是|叫)(谁|什么)？"],
    "tell_pet": [
        "I have a {p} (called|named) {m}.", "My {p} is (called|named) {m}.", "My {p}'s name is {m}.", "The name of my {p} is {m}.",
        "(I've got|We have|I own|I got) a {p}(,|;) (his|her|its) name is {m}.", "{m} is my {p}.", "(We|I) (call|named) (our|my|the) {p} {m}.",
        "My {p} (answers to|has the name) {m}.", "I have a {p}. (He|She|It) is called {m}.",
        "I (bought|adopted|have) a (new |little |big |)(white |black |brown |){p} (called|named) {m}.", "This is my {p} {m}.",
        "At home there is (my |a |){p} (called|named) {m}.", "I (keep|own) a {p}, {m}.", "Our {p} is {m}.",
        "My {p} {m} (is old|is cute|likes to sleep|eats a lot).", "I take care of {m}, my {p}.", "The {p} I have is called {m}."],
    "tell_pet_zh": [
        "我(有|养了)(一只|一条|一个|)(叫|名叫){m}的{p}。", "我的{p}(叫|名叫|的名字是|名字叫){m}。", "我有(一只|一条|个){p}，(叫|它叫|名字是|名字叫){m}。", "{m}是我的{p}。", "我家的{p}叫{m}。",
        "我给{p}取名{m}。", "{m}是我养的{p}。", "我养(了|的)(只|一只|){p}，名叫{m}。", "我有{p}，名字是{m}。"],
    "fix_pet": [
        "(No|Sorry|Wait), (my {p} is called|the {p}'s name is|my {p}'s name is) {m}.", "(Actually|In fact)(,|) my {p} is (called|named) {m}.",
        "(We|I) renamed (the|my|our) {p}(:| to|,) {m}.", "My {p} is called {m}, not {o}.", "(Oops|Ah), the {p} is called {m}.",
        "(It's|The name is|I meant) {m}, not {o}.", "My {p} has a new name(: |, ){m}."],
    "fix_pet_zh": [
        "(不|不对|错了)，我的{p}叫{m}。", "(其实|实际上)我的{p}叫{m}。", "我的{p}叫{m}，不叫{o}。", "(它|{p})(现在|其实)叫{m}。", "{p}改名叫{m}了。"],
    "ask_pet": [
        "(What is|What's|What was|Whats) my {p}'s name( again|)?", "(What is|What's|Tell me) the name of my {p}?", "(What|How) is my {p} called?",
        "(Do|Can) you (remember|know) (my {p}'s name|the name of my {p}|what my {p} is called|how my {p} is called)?",
        "What (do|did) I call my {p}?", "Who is my {p}?", "My {p} is called( what|)?", "(Can you tell|Tell) me my {p}'s name.",
        "What name does my {p} have?", "my {p}'s name?", "Which name did I give (to |)my {p}?", "(And |)the name of my {p}?",
        "My {p} has (what|which) name?", "What is the {p} called( that I have|)?", "you remember my {p}'s name?"],
    "ask_pet_zh": [
        "我的{p}(叫什么(名字|)|的名字是什么|叫啥|的名字|名字是什么)？", "你(记得|知道|还记得)我的{p}(叫什么|的名字)吗？", "我家的{p}叫什么？", "(告诉我|说说)我的{p}的名字。", "{p}叫什么(名字|)？", "我养的{p}叫什么？",
        "我给{p}取了什么名？"],
    "tell_city": [
        "I live in {m}.", "My home is (in |){m}.", "I (come|am|hail) from {m}.", "I'm from {m}.", "My (city|town|hometown) is {m}.",
        "I (moved|have moved) to {m}( last year|).", "(We|My family and I) live in {m}.", "I am (living|based|at home) in {m}( now|).",
        "{m} is (my home|where I live|my city).", "I was born in {m} and live there.", "(My house|My flat) is in {m}.",
        "I (reside|dwell|grew up) in {m}.", "{m} is where I (am from|come from|grew up).", "My (family|wife|husband) and I have a house in {m}.",
        "I (work|study) and live in {m}.", "Home is {m}( for me|).", "I'm (a student |a teacher |)living in {m}."],
    "tell_city_zh": [
        "我(住在|住|来自|在){m}(住|)。", "我(家|的家|家住)在{m}。", "我是{m}人。", "我从{m}来。", "我搬到了{m}。", "我的城市是{m}。", "{m}是我的家。", "我在{m}(生活|工作|上学|长大)。", "我老家在{m}。",
        "我的家乡是{m}。"],
    "fix_city": [
        "(No|Sorry|Wait), I live in {m}.", "(Actually|In fact)(,|) I (live|am living) in {m}( now|).", "(Now|Since today) I live in {m}.",
        "I (have |)moved to {m}.", "I don't live in {o}, I live in {m}.", "I live in {m}, not {o}.", "(Oops|Ah), it's {m}(, not {o}|).",
        "We (live|moved) (in|to) {m} (now|meanwhile).", "No, {m} is my home."],
    "fix_city_zh": [
        "(不|不对|错了)，我住在{m}。", "(其实|现在)我住在{m}。", "我搬到{m}了。", "我不住在{o}，我住在{m}。", "(现在|后来)我在{m}住。", "家搬到{m}了。"],
    "ask_city": [
        "Where do I live?", "(Which|What) (city|town|place) do I live in?", "Where (is|was) my home?",
        "(In|From) (which|what) (city|town|place) do I (live|come)?", "(Do|Can) you (remember|know) where I (live|come from|am from)?",
        "Where (am I|do I come) from?", "(What is|What's) my (city|home town|town|hometown)?", "(Can you tell|Tell) me where I live.",
        "Where is my house?", "(Which|What) city is my home?", "Where did I say I live?", "(What|Which) (place|city|town) am I from?",
        "(So |And |)where do I live( again| now|)?", "My home is where?", "Where do I come from?", "you remember where I live?"],
    "ask_city_zh": [
        "我住在(哪里|哪儿|哪个城市|什么地方|哪)？", "我(家|的家)在(哪里|哪儿|哪)？", "我(来自|是)(哪里|哪儿|哪里人|哪个城市)？", "你(记得|知道|还记得)我住在(哪里|哪儿|哪个城市)吗？", "我的城市是(哪个|什么)？", "我从哪里来？",
        "告诉我我住在哪里。", "我家住哪里？", "我的家乡是哪里？", "我在哪里(生活|住)？"],
    "tell_number": [
        "(My|The) (|lucky |secret |favorite |favourite )number is {m}.", "(Please |)remember (the number |this number: |){m}.",
        "Keep (the number |){m} in mind.", "(The|My) (code|pin|password|room number|phone number) is {m}.", "I am thinking of (the number |){m}.",
        "Remember {m}(, please| for me|).", "Don't forget (the number |){m}.", "{m} is (the|my) (number|code).", "Note (down |)the number {m}.",
        "Number: {m}", "The number to remember is {m}.", "My (locker|ticket|flat|customer) number is {m}.",
        "(Store|Save|Memorize) (the number |){m}.", "Here is a number: {m}", "The (magic|secret) number: {m}", "Please note {m}."],
    "tell_number_zh": [
        "(请|)记住(数字|号码|这个数字：|){m}。", "我的(数字|号码|幸运数字|密码|电话号码)是{m}。", "(数字|密码|号码|代码)是{m}。", "别忘了(数字|){m}。", "我想的数字是{m}。", "{m}是我的幸运数字。", "记下{m}。",
        "有个数字：{m}", "我的(房间号|门牌号|学号)是{m}。"],
    "fix_number": [
        "(No|Sorry|Wait), (the number is|it is|I meant|it's) {m}.", "(Actually|In fact)(,|) (the|my) number is {m}.", "The number is {m}, not {o}.",
        "(Now|Please) remember {m} instead.", "I changed the (number|code) to {m}.", "(Oops|Ah), {m}(, not {o}|).", "Make that {m}.",
        "Take {m} (as the number|instead of {o})."],
    "fix_number_zh": [
        "(不|不对|错了)，(是|数字是){m}。", "(其实|现在)数字是{m}。", "(是|数字是){m}，不是{o}。", "改成{m}。", "应该是{m}。"],
    "ask_number": [
        "(What is|What's|What was|Tell me|Whats) (my|the) (|lucky |secret |favorite |favourite )number( again|)?",
        "(What|Which) number did I (tell you|say|give you|mention|ask you to remember|want you to remember)?",
        "(What|Which) number (should|did) you remember?", "(Do|Can) you (remember|know) (the|my) number?",
        "(What is|What was|Tell me) (the|my) (code|pin|password|room number|phone number)?", "Which number was it?", "(the|my) number?",
        "What number am I thinking of?", "Repeat my number.", "(And |So |)the number?", "(What|Which) number is (mine|it)?",
        "Give me (the|my) number( back|).", "you remember the number?"],
    "ask_number_zh": [
        "(我的|)(数字|号码|幸运数字|密码|电话号码|代码)是(什么|多少|几)？", "我(让你记住|说|告诉你|想)的(数字|号码)是(什么|多少|哪个)？", "你(记得|知道|还记得)(那个|我的)(数字|号码)吗？", "是哪个数字？", "我让你记住什么数字？",
        "(说出|告诉我)(那个|我的)(数字|号码)。", "数字(是|)多少来着？"],
    "tell_age": [
        "I am {m} years old.", "I'm {m}( years old|).", "My age is {m}.", "I (turned|became) {m} (last week|yesterday|this year).", "I am {m}.",
        "I have just turned {m}.", "(This year |Now |)I am {m}( years of age|).", "Age: {m}",
        "I was {m} on my last birthday."],
    "tell_age_zh": [
        "我(今年|){m}岁(了|)。", "我的年龄是{m}。", "我已经{m}岁了。", "我{m}周岁。", "(年龄|岁数)：{m}"],
    "fix_age": [
        "(No|Sorry|Wait), I am {m}( years old|).", "(Actually|In fact)(,|) I am {m}( years old|).", "I am {m}, not {o}.",
        "(Oops|Ah), {m}( years|)(, not {o}|).", "It was my birthday, now I am {m}."],
    "fix_age_zh": [
        "(不|不对|错了)，我{m}岁。", "其实我{m}岁。", "我{m}岁，不是{o}岁。", "(过完生日|现在)我{m}岁了。"],
    "ask_age": [
        "How old am I?", "(What is|What's|Tell me) my age?", "(Do|Can) you (remember|know) (how old I am|my age)?", "What age am I?",
        "How many years old am I?", "When did I say how old am I?", "my age?", "(So |And |)how old am I( now| again|)?", "My age is( what|)?",
        "How many years do I have?", "you remember my age?"],
    "ask_age_zh": [
        "我(今年|)(几岁|多大|多少岁)(了|)？", "我的年龄是多少？", "你(记得|知道)我(几岁|多大)吗？", "我多大年纪？", "我(现在|)(几岁|多大)？", "说说我的年龄。"],
    "tell_friend": [
        "My {r} is (called|named) {m}.", "My {r}'s name is {m}.", "I have a {r} (called|named) {m}.", "{m} is my {r}.",
        "The name of my {r} is {m}.", "(This is|I live with|I love|I saw) my {r} {m}.", "My {r} {m} (is here|is nice|likes {n}|comes today).",
        "I have a {r}(, his name is|, her name is|:) {m}.", "{m} is the name of my {r}.", "My {r}: {m}",
        "I (visited|met|called|know) {m}, (who is |)my {r}.", "I (visited|met|called) my {r}, {m}.", "(He|She) is my {r}, (his|her) name is {m}."],
    "tell_friend_zh": [
        "我的{r}(叫|名叫|是|的名字是){m}。", "我有(一个|个)(叫{m}的{r}|{r}叫{m}|{r}，叫{m})。", "{m}是我的{r}。", "我{r}叫{m}。", "{m}就是我{r}。", "我{r}的(名字|大名)是{m}。",
        "我(见了|认识)我的{r}{m}。"],
    "fix_friend": [
        "(No|Sorry|Wait), my {r} is (called|named) {m}.", "(Actually|In fact)(,|) my {r}'s name is {m}.", "My {r} is called {m}, not {o}.",
        "(Oops|Ah), my {r} is {m}(, not {o}|).", "I meant {m}, that is my {r}."],
    "fix_friend_zh": [
        "(不|不对|错了)，我的{r}叫{m}。", "其实我的{r}叫{m}。", "我的{r}叫{m}，不叫{o}。", "我{r}其实是{m}。", "{r}的名字是{m}。"],
    "ask_friend": [
        "(What is|What's|What was|Whats) my {r}'s name( again|)?", "(What is|Tell me) the name of my {r}?", "Who is my {r}?",
        "(How|What) is my {r} called?", "(Do|Can) you (remember|know) (my {r}'s name|who my {r} is|the name of my {r}|what my {r} is called)?",
        "My {r} is called( what|)?", "(Can you tell|Tell) me (my {r}'s name|who my {r} is).", "(And |So |)my {r}'s name?",
        "(And |So |)who is my {r}( again|)?", "My {r} has (what|which) name?", "What do (I|people) call my {r}?"],
    "ask_friend_zh": [
        "我(的|){r}(叫什么(名字|)|的名字是什么|是谁|叫啥)？", "你(记得|知道|还记得)我的{r}(叫什么|是谁|的名字)吗？", "谁是我的{r}？", "(告诉我|说说)我{r}的名字。", "我{r}叫什么(名字|)？", "我{r}是谁？",
        "说出我{r}的名字。"],
    "tell_favourite": [
        "My (favourite|favorite) {n} is {m}.", "{m} is my (favourite|favorite) {n}.", "The {n} (that |)I like (best|most) is {m}.",
        "(For me|To me) the best {n} is {m}.", "My (favourite|favorite) {n}: {m}", "I love {m}, it is my (favourite|favorite) {n}.",
        "As for {n}, I like {m} (best|most).", "Of all {n}, I prefer {m}.", "I like {m} more than any other {n}.",
        "I (really |)(like|love) {m}. (It's|That's) my (favourite|favorite) {n}.", "My (favourite|favorite) {n} has always been {m}.",
        "When it comes to {n}, {m} (is the best|is my favourite|is my favorite).", "The {n} I love is {m}.",
        "{n}: {m} is (my favourite|my favorite|the best)."],
    "tell_favourite_zh": [
        "我最喜欢的{n}是{m}。", "{m}是我最喜欢的{n}。", "{n}我最喜欢{m}。", "我喜欢的{n}是{m}。", "我最爱的{n}是{m}。", "{n}里我最爱{m}。", "我觉得最好的{n}是{m}。", "说到{n}，我喜欢{m}。"],
    "fix_favourite": [
        "(No|Sorry|Wait), my (favourite|favorite) {n} is {m}.", "(Actually|In fact|Now)(,|) my (favourite|favorite) {n} is {m}.",
        "My (favourite|favorite) {n} is {m}, not {o}.", "I changed my mind: my (favourite|favorite) {n} is {m}.",
        "(Oops|Ah), I like {m} best(, not {o}|).", "{m} is my (favourite|favorite) {n} now."],
    "fix_favourite_zh": [
        "(不|不对|错了)，我最喜欢的{n}是{m}。", "(其实|现在)我最喜欢的{n}是{m}。", "我最喜欢的{n}是{m}，不是{o}。", "我改主意了，最喜欢的{n}是{m}。", "现在我更喜欢{m}，{n}里它最好。"],
    "ask_favourite": [
        "(What is|What's|What was|Tell me|Which is|Whats) my (favourite|favorite) {n}( again|)?",
        "(Which|What) {n} (do I like|do I like best|do I like most|do I love|do I prefer)( the most|)?",
        "(Do|Can) you (remember|know) (my (favourite|favorite) {n}|which {n} I like|what {n} I like best)?", "What {n} is my (favourite|favorite)?",
        "my (favourite|favorite) {n}?", "What did I say my (favourite|favorite) {n} was?", "(So |And |)what is my (favourite|favorite) {n}?",
        "My (favourite|favorite) {n} is( what|)?", "(What|Which) {n} did I (say|tell you) (I like|I love|is my favourite|is my favorite)?",
        "(What|Which) is the {n} I like?"],
    "ask_favourite_zh": [
        "我最喜欢的{n}是(什么|哪个|哪种|谁)？", "我(最喜欢|喜欢)(什么|哪个|哪种){n}？", "你(记得|知道|还记得)我最喜欢(的|什么){n}吗？", "{n}我最喜欢(什么|哪个)？", "我最爱的{n}是(什么|哪个)？",
        "我喜欢的{n}是(什么|哪个)？", "说出我最喜欢的{n}。"],
    "tell_thing": [
        "My {n} is {m}.", "The {n} is {m}.", "(Remember that|Note that|Remember:) (my|the) {n} is {m}.", "My {n} is called {m}.",
        "(I have|I own|I bought) a {n}, it is {m}.", "My {n}: {m}", "The {n} I have is {m}.", "{m} is my {n}.", "I call my {n} {m}.",
        "(Please remember|Keep in mind): my {n} is {m}."],
    "tell_thing_zh": [
        "我的{n}是{m}。", "(记住|请记住)，我的{n}是{m}。", "{m}是我的{n}。", "我的{n}叫{m}。", "{n}：{m}", "我有个{n}，是{m}。"],
    "fix_thing": [
        "(No|Sorry|Wait), (my|the) {n} is {m}.", "(Actually|In fact)(,|) (my|the) {n} is {m}.", "My {n} is {m}, not {o}.",
        "(Oops|Ah), my {n} is {m}(, not {o}|).", "Make my {n} {m}."],
    "fix_thing_zh": [
        "(不|不对|错了)，我的{n}是{m}。", "其实我的{n}是{m}。", "我的{n}是{m}，不是{o}。", "{n}应该是{m}。"],
    "ask_thing": [
        "(What is|What's|What was|Tell me|Whats) (my|the) {n}( again|)?", "(Do|Can) you (remember|know) (what (my|the) {n} is|my {n})?",
        "What did I (say|tell you) about (my|the) {n}?", "(my|the) {n}?", "(How|What) is my {n} called?", "(What|Which) {n} do I have?",
        "(So |And |)what is (my|the) {n}?", "My {n} is( what|)?", "What do I call my {n}?", "Which was my {n}?"],
    "ask_thing_zh": [
        "我的{n}(是什么|叫什么|是哪个|是谁|呢)？", "你(记得|知道|还记得)我的{n}(是什么|)吗？", "(告诉我|说说)我的{n}。", "{n}是什么？我说过的。", "我说过的{n}是什么？"],
}

# Small talk: the answer, and what it answers to.
CHAT: dict[str, list[str]] = {
    "Hello! How can I help you?": [
        "(Hello|Hi|Hey|Hiya|Howdy|Greetings|Good day|Hello there|Hi there|Hey there|Yo)(!|.|)", "Good (morning|evening|afternoon)(!|.|)",
        "(Hello|Hi|Hey), (you|bot|computer|friend|Qwen|robot|everyone)!", "Is (anybody|anyone|someone) there?", "(hello hello|hi hi|helo|hallo)",
        "Nice to meet you.", "(hi|hello|hey) (again|dear|buddy|guys|friend|all)(!|.|)", "I (want|would like) to (talk|chat)( with you|).",
        "Are you there?", "Let's (talk|chat).", "(Hello|Hi), (I am new here|are you there|can you hear me)?"],
    "I am a very small demonstration model that comes with qwen3.py.": [
        "(Who|What) are you?", "(What is|What's) your name?",
        "Are you (a robot|human|a bot|a person|real|an AI|alive|Qwen|ChatGPT|a machine|a computer)?",
        "(Tell me about|Introduce|Describe) yourself.", "(What|Which) model are you?", "(Do you have|What about) a name?",
        "Who (made|built|trained|created) you?", "(Am I talking|Do I talk) to a (human|robot|machine|person)?", "How (big|small|large) are you?",
        "How many parameters do you have?", "(What's|What is) this( program| thing| model|)?", "What are you( exactly| called| really|)?",
        "(Who|What) is (speaking|talking|there|this)?", "(Please |)say (something|a few words) about yourself.", "(How|What) should I call you?",
        "Which (AI|program|bot) is this?", "Do you have parents?", "What kind of (AI|bot|model|program|machine) are you?", "are you chatgpt"],
    "I know facts about countries, I add and subtract numbers up to three digits, remember what you tell me, call tools and tell short stories.": [
        "(What|What things) can you do( for me|)?", "(help|Help me|Help me, please|/help|?)", "How can you help( me|)?",
        "What do you know( about|)?", "(What are|Tell me|List) your (skills|abilities|features).", "What (can|may|should|could) I ask( you|)?",
        "(How do|How can) I use you?", "What are you (good at|for|able to do)?", "Can you help me( with something|)?", "I need (your |)help.",
        "(Show|Tell) me what you can do.", "What (is|are) your (skills|talents|strengths|use)?", "What (is|are) you (made|trained|built) for?",
        "What kind of questions (can|do) you answer?", "(I am lost|I don't know what to ask), what can I ask?", "What else can you do?",
        "how does this work"],
    "I am fine, thank you. How can I help you?": [
        "How are you( today| doing|)?", "How (is it going|do you do|are things|do you feel)?", "Are you (ok|okay|well|fine|happy|good|tired|sad)?",
        "(What's|What is) up?", "How was your day?", "How's (life|it going)?", "How have you been?",
        "(How are|How do) you (feel|feeling|getting on|today)?", "(Everything|All) (ok|okay|good|well|fine)( with you|)?", "You ok?", "how r u"],
    "You are welcome!": [
        "(Thank you|Thanks|Thx|Cheers)(!| a lot| very much| so much| for your help| for that|.|)",
        "(Great|Nice|Good|OK|Perfect), (thanks|thank you)(!|.|)", "(That was|You were|This is) (helpful|great|kind|nice)(, thanks|).",
        "I thank you.", "Many thanks!", "(Great|Good|Well) (job|work|done)!", "(You are|You're) (great|nice|clever|smart|good|the best)!",
        "I (like|love) you.", "(Thanks|Thank you)(,| my| dear|) (friend|bot|a bunch|a million|again)(!|.|)",
        "(Awesome|Wonderful|Super|Excellent), (thanks|thank you)(!|.|)", "I appreciate (it|that|your help).",
        "You (helped|saved) me( a lot|)(!|.|)", "(thanks|thank you) for (everything|the answer|helping)"],
    "Goodbye!": [
        "(Bye|Goodbye|Bye bye|See you|See you later|Good night|Farewell|Ciao|See ya|Good bye|Take care|So long)(!|.|)",
        "(I have|I need|I've got) to go( now|).", "(I am|I'm) (leaving|going|off)( now|).", "(That is|That's|This is) all( for today| for now|).",
        "Until (tomorrow|next time)!", "(I'll|I will) (leave|go|stop|be back)( now| later|).",
        "(Have a|Wish you a) (nice|good|great) (day|evening|weekend|one)(!|.|)", "(See|Talk to) you (soon|tomorrow|around|next time)(!|.|)",
        "(Quit|Exit|Stop)(!|.|)", "(OK|Well), (bye|goodbye)(!|.|)"],
    "All right.": [
        "(OK|Okay|Ok|ok|I see|Alright|All right|Fine|Sure|Yes|No|Cool|Good|Great|Nice|Right|Hm|Hmm|Aha|Oh|Wow|Well|Yeah|Yep|No"
        "pe|Interesting|Indeed|Understood|Got it|Never mind|lol|haha)(!|.|)",
        "(Of course|Exactly|Right|Sounds good|No problem|As you like|Whatever|Maybe|Perhaps|Not bad|Really)(!|.|)"],
    "I am sorry to hear that.": [
        "(I am|I'm|I feel) (sad|tired|ill|sick|lonely|bored|angry|unhappy|not well|afraid|hungry|cold)( today|).",
        "(That is|That's|This is|You are|You're) (wrong|bad|stupid|not right|not true|false|terrible|useless|silly).",
        "(I have|I had) a bad (day|dream|week).", "I (hate|don't like) (you|this|that).",
        "(My day was|Today was|It was) (bad|terrible|hard|awful)( today|).", "(Nobody|No one) (likes|loves|understands) me.",
        "I have (a headache|a cold|no friends|no time|problems|pain).", "You (make|made) (mistakes|a mistake|me sad|me angry)."],
    "I am glad to hear that.": [
        "(I am|I'm|I feel) (happy|fine|well|good|great|glad|okay|in love)( today|).",
        "(That is|That's|This is) (right|good|correct|true|great|nice|cool|wonderful|funny).",
        "(I have|I had) a (good|great|nice|lovely) (day|dream|week).", "(My day was|Today was|It was) (good|great|wonderful|nice|fun)( today|).",
        "(I love|I like|I enjoy) (this day|my life|my job|today).", "I (won|passed|made it|did it)(!|.|)",
        "Everything is (fine|great|good)( now|)."],
    "你好！我能帮你什么？": [
        "(你好|您好|嗨|早上好|下午好|晚上好|喂|哈喽|大家好|早|你好呀|你好啊|早安)(！|。|)", "(有人|你)在吗？", "很高兴认识你。", "(哈啰|嘿|你们好|老师好|同学你好|朋友你好|晚上好啊)(！|。|)", "我们聊(聊|聊天)吧。"],
    "我是 qwen3.py 附带的一个很小的演示模型。": [
        "你是(谁|什么|什么模型|哪个模型|做什么的)？", "你(叫什么|叫什么名字|的名字是什么|名字叫什么)？", "你是(机器人|人|人类|真人|人工智能|电脑)吗？", "(介绍一下|介绍|说说)你自己。", "谁(创造|训练|做|开发)了你？", "自我介绍一下。",
        "(请|)介绍(一下|)自己。", "我(该|)(怎么|如何)称呼你？", "这是(什么|什么程序|什么模型)？", "你是(聊天机器人|AI|程序)吗？"],
    "我知道各国的知识，会三位数以内的加减法，能记住你说的话，会用工具，也会讲小故事。": [
        "你(会|能)(做什么|干什么|干嘛|些什么|什么)？", "(帮助|帮帮我|帮我|请帮我)", "你(怎么|能)帮我(吗|什么|)？", "你知道(什么|些什么)？", "我(能|可以)问你什么？", "你有什么(功能|本领|技能)？", "怎么用你？",
        "你(擅长|懂|会)(什么|哪些)？", "你有(什么|啥)(用|本事)？", "(说说|讲讲)你会(什么|做什么)。", "我(可以|能|该)(做什么|问什么)？"],
    "我很好，谢谢。我能帮你什么？": [
        "你(好吗|怎么样|还好吗|过得好吗|今天好吗|累吗|开心吗|高兴吗)？", "最近(怎么样|好吗|如何)？", "你今天(怎么样|过得怎么样)？", "你(最近|)(好不好|还好吧|怎样)？", "(今天|)(心情|感觉)(好吗|怎么样|如何)？"],
    "不客气！": [
        "(谢谢|谢谢你|多谢|感谢|非常感谢|谢了|谢谢您|太感谢了)(！|。|)", "(太好了|很好|好的)，谢谢。", "你(真棒|真好|真聪明|很厉害|太棒了)(！|。|)", "(多谢你|辛苦了|麻烦你了|谢谢啦|十分感谢)(！|。|)",
        "你帮了(我|)大忙(！|。|)"],
    "再见！": [
        "(再见|拜拜|回头见|明天见|晚安|下次见|我走了|再会|拜)(！|。|)", "我(要|得)走了。", "(下次聊|先走了|我下线了|改天见|回聊)(！|。|)", "(今天|)就到这里(吧|)。"],
    "好的。": [
        "(好|好的|嗯|哦|行|可以|是的|不|对|知道了|明白了|明白|没事|哈哈|原来如此|是|真的吗)(！|。|)", "(没问题|当然|好吧|随便|是啊|对的|不错|真的)(！|。|)"],
    "听到这个我很难过。": [
        "我(很|好|有点)(难过|累|伤心|无聊|生气|孤单|不开心|害怕|饿|冷)(。|)", "(不对|错了|你错了|不是这样)(。|)", "(今天|)(心情|天气)(不好|很差|糟糕)(。|)", "我(生病|感冒|失败|失恋|头疼)了(。|)"],
    "真为你高兴。": [
        "我(很|好|非常)(开心|高兴|快乐|幸福)(。|)", "(今天|)(天气|心情)(真|很)好。", "我(今天|)过得很好。", "我(成功|赢|考过|恋爱)了(。|！|)", "(今天|一切)(很|都)(好|顺利|开心)(。|)"],
}

# What lies outside the model's world (n, o: nouns, q: a plural, a: an adjective, v: a verb, x: a made-up word or a
# name, c: a country, k: a city).
UNKNOWN: list[str] = [
    "Who (is|was|are) {x}?",
    "Who (invented|discovered|made|created|built|wrote|painted|designed|founded|composed|sang|directed|started) (the {n}|{x}|the first {n}|{q})?",
    "Who (is|was) the (|first |last |best |current |greatest |richest |new )(president|king|queen|leader|prime minister|mayor|emperor|owner|"
    "boss|captain|author|singer|actor|writer|painter|champion|winner) of {w}?",
    "Who (won|lost|played in|started|ended|plays in) the (|last |first |{a} )(world cup|war|election|game|race|match|league|Olympics|final|{n})?",
    "(What is|What's|What are|What was|Explain|Define|Describe) (|the |a )(|{a} ){n}?", "(What|What all) (is|are|was) {x}?",
    "(What is|What's) (the |)(meaning|definition|origin|purpose|point|use|cause|colour|color|weight|price|length|size|age|speed|temperature|"
    "history|shape|taste) of (|the |a ){n}?",
    "(What|Which) is the (largest|biggest|smallest|longest|highest|tallest|fastest|oldest|best|deepest|hottest|most popular|most {a}|strongest|"
    "richest|cheapest) {n}( in the world| of all| in {w}| ever|)?",
    "(What is|What's|Tell me) the {n} (of|in|for) {w}?",
    "(What is|Tell me) the (population|area|size|flag|president|history|weather|food|religion|climate|national anthem|highest mountain|longest "
    "river|king|queen|army|phone code|time zone|GDP|economy|culture|national animal) (of|in) {w}?",
    "How many (people|{q}|inhabitants|cities|rivers|lakes|islands|mountains|states) (live|are|are there) in {w}?",
    "How many {q} (are there|exist|fit in {a} {n}|does a {n} have|do I need|are in a {n})?",
    "How (big|large|old|far|rich|hot|cold|small|long|high|deep|heavy|fast|expensive|tall|safe|strong|good) (is|was|are) (the |a |){n}?",
    "How (big|large|old|rich|hot|cold|small|safe|expensive) is {w}?", "How far is it from {k} to {w}?",
    "How (do|can|should) (I|you|we|people) {v} (a|the|my|an) (|{a} ){n}?",
    "How (do|does|did) (a |the |){n} (work|{v}|fly|grow|move|live|sleep|die|begin|end)?", "How (do|can) I (get|go|travel|fly) to {w}?",
    "How to {v} (a|the|my) {n}?", "How long (does|do|did) (it take to {v} (a|the) {n}|{q} live|a {n} last|the {n} take)?",
    "Why (is|are|was) (the |a |my |){n} (so |){a}?", "Why (do|does|did|don't) (|the |my ){q} {v}( {q}| the {n}|)?",
    "Why (should|do|can't|must) I {v} (the |a |my ){n}?",
    "When (was|is|did|does|will) (the |a |){n} (invented|born|founded|built|start|end|begin|{v}|open|close|come)?",
    "When (was|did) {x} (born|founded|die|live|built|start)?", "When (was|did) {w} (founded|become independent|begin)?",
    "Where (is|are|was|can I find|do I find|can I buy|do I get) (the|a|my|an|the nearest|a good) (|{a} ){n}?",
    "Where do {q} (live|come from|sleep|grow|go|{v})?", "Where (was|is) {x} (born|made|from|buried)?",
    "What do {q} (eat|do|mean|look like|cost|need|like|{v})?", "(Is|Are) (a |the |){n} {a}?",
    "(Are|Do) {q} (dangerous|{a}|alive|fly|swim|{v}|sleep)?", "Can (a |the |){q} {v}( {q}| a {n}|)?",
    "(Can|Could|Would|Will) you {v} (a|the|my|me a|an) (|{a} ){n}( for me|)?", "(Please |){v} (a|the|my|this|an) (|{a} ){n}.",
    "(Write|Give me|Make|Create|Show me|Send me|Generate|Draw|Design|Compose) (a|an|me a|some|the) (|{a} )(poem|song|email|letter|essay|"
    "program|function|list|recipe|joke|picture|plan|code|script|summary|report|speech|text|article|table|riddle|haiku|rap|novel|diet|quiz|"
    "class|website|query|app|regex|image)( about {q}| about {n}| for my {n}| on {n}| that can {v}| to {v} {q}| in {y}|).",
    "(Write|Give me|Show me) (a |some |)(Python|Java|C|JavaScript|SQL|HTML|Rust|Go|bash) (code|function|program|script|class|loop|example)( to "
    "{v} {q}| for {q}| that (sorts|adds|reads|prints|finds|counts) {q}| for a {n}|).",
    "(Translate|Summarize|Explain|Correct|Rewrite|Proofread|Read|Analyse|Paraphrase) (this|the|my|the following) (text|sentence|article|{n}|"
    "book|letter|paragraph)( into {y}| to {y}|)(: {z}|.|)",
    "(Translate|Say) (\"|'|){n}(\"|'|) (in|into|to) {y}.", "How do you say (\"|){n}(\"|) in {y}?", "What does (the word |)(\"|){x}(\"|) mean?",
    "What does {n} mean( in {y}|)?",
    "(Tell|Give) me (a |some |the |)(joke|news|advice|secret|riddle|quote|fun fact|latest news|truth|time|date)( about {q}|)(.| please.|)",
    "What (time|day|date|year|month) is it( today| now|)?", "(What|How) is the weather( today| tomorrow| like| in {w}|)?",
    "Will it (rain|snow) (today|tomorrow|in {k})?",
    "(Recommend|Suggest) (a|some|me a) (|good |{a} )(book|film|movie|song|restaurant|hotel|game|{n})( about {q}| in {w}|).",
    "What (should|can|do) I (eat|do|wear|read|buy|cook|watch|say|{v})( today| tonight| for dinner| with {q}|)?",
    "(Do|Did) you (like|know|love|hate|see|want|remember|think about) (|{a} )({q}|{x}|the {n}|music)?",
    "Do you (dream|sleep|think|believe in {q}|have (a |){n}|feel pain|eat|{v})?",
    "Which {n} (is|was|should I|do you) (the best|better|{v}|buy|like)?",
    "Which is (better|bigger|older|faster|heavier), (a |the |){n} or (a |the |){o}?",
    "(What is|What's) the (difference|distance|relation|connection) between (a |){n} and (a |){o}?",
    "(Compare|Connect|Combine) {q} (and|with|to) {o}.",
    "What (happened|happens|will happen) (in|on|after|to|when|if) (the {n}|{i}|{x}|{q} {v}|I {v} {q})?",
    "What year (was|did) (the {n}|{x}) (begin|end|born|invented|happen)?",
    "(I|We|They) (want to|can't|must|will|should|have to|like to) {v} (the|a|my) (|{a} ){n}.", "{n}", "{a} {n}", "{x}", "{n} {o} {v}", "{v} {q}",
    "(What is|Tell me) the capital of {x}?", "(Where is|Tell me about|Do you know|What do you know about|Is there|What about) {x}?",
    "(What|Which) (language is spoken|currency is used) in {x}?",
    "(What is|What's) the (chemical formula|symbol|atomic number|boiling point|density|square root|recipe|formula|opposite|plural|synonym|"
    "address|phone number|abbreviation) (of|for) (a |the |){n}?",
    "Is (there|it true that there is) (a |)(life|{n}|water|god|{q}) (on|in|under) (Mars|the moon|the sea|the {n}|{w})?",
    "Tell me (something |more |everything |)about (the |){n}.",
    "(Tell me about|Explain|What is|Teach me) (the theory of|the history of|the basics of|how to {v}) {q}.",
    "(Explain|What is|What are) (quantum|nuclear|organic|modern|ancient|global|solar|{a}) (physics|chemistry|history|mechanics|energy|art|"
    "music|warming|philosophy|{q}).",
    "(Should|Must|May|Could) I {v} (my|the|a) {n}?", "What (color|colour|size|shape|kind|sort) (is|are) (the |a |){n}?",
    "(Play|Sing|Dance|Paint|Buy|Order|Book|Open|Close|Find|Turn on|Call) (a |the |my |me a |){n}.",
    "How much (is|does|are|do) (a |the |){n} (cost|weigh|worth|need)?",
    "(Fix|Debug|Run|Compile|Check) (my|this|the) (code|program|bug|script|computer|{n}).",
    "(Spell|Count|Reverse|Sort|Find) (the |)(letters in |word |){n}.", "How many (letters|vowels|words|r's) are in (the word |){n}?",
    "(If|When) (a |the |){n} (is|has|gets) {a}, (what|why|how) (is|does|should) (the {o}|it|I) {v}?", "Are there {q} in {w}?",
    "(Which|What) {q} (live|are|grow|can I see) in {w}?", "Is {w} (rich|big|poor|safe|beautiful|cold|{a}|bigger than {k})?",
    "What is {w} (famous|known) for?",
    "My {n} (won't|does not|doesn't|can't) {v}(, help| any more|. Why|. What now|)(?|.)",
    "(Compose|Prepare|Produce|Invent|Improve|Finish|Continue) (a|an|my|the) (|{a} )(poem|letter|essay|speech|invitation"
    "|{n})( about {q}| for {x}|).",
    "(What|Which) (number|code|abbreviation|postcode|zip code|internet domain) (does|has) {w} (have|)?",
    "I (am|feel) {a}, (what|which) {n} (do I need|should I {v}|is right)?",
    "I (am|was) {v}ing (the|a|my) {n}, (what|how|why) (should I do|does it work|is it {a})?",
    "(Give|Send|Lend) me (|some |your |a ){n}.",
    "(Predict|Imagine|Guess|Estimate) (the|a|my) {n}.",
    "(What|Which) {n} (does|has|did) {w} (have|need|win)?",
    "What (is|would be) (a good|the right|the best) {n} (for|of|to) {q}?",
    "(Act|Behave|Pretend to be|Speak) (as|like|) (a|an) {n}.",
    "(How|Why) (did|does|was) {x} {v} (the |){n}?",
    "(Is|Was|Has) {x} (a |an |){n}?"]
UNKNOWN_ZH: list[str] = [
    "(什么是|请解释|解释一下|定义|介绍一下){n}(？|。)", "{n}是(什么|谁|什么意思|怎么来的|怎么做的|干什么的)？", "{x}是谁？", "{x}是什么(|意思|东西)？", "谁(发明|发现|创造|写|画|设计|建造)了{n}？",
    "谁是(世界|历史|{w})(上|)(最|第一个|现任)(好|有钱|有名|著名|)(的|)({n}|总统|国王|作家|歌手)？", "{w}的(总统|国王|人口|面积|历史|天气|国旗|美食|特产|文化|经济|最高的山|{n})(是谁|是什么|是多少|怎么样|有哪些|)？",
    "{w}有(多少人|多少人口|多大|什么好吃的|什么好玩的|多少{n})？", "(怎么|如何|怎样)(做|买|修|学|用|写|画|找|写好|养){n}？", "为什么{n}(是|会|不|那么|要)(红|白|大|小|贵|跑|飞|好|睡|吃)(的|)？",
    "为什么(天空|海水|月亮|太阳|{n})(是蓝的|是咸的|会变|发光|这么热)？", "(什么时候|哪年|何时)(发明|出现|有|开始|结束)(了|的|){n}？", "{n}(在哪里|在哪儿|多少钱|有多重|有多大|有多少|好吃吗|贵吗|有用吗|危险吗|好吗|会飞吗)？",
    "(世界上|)(最大|最小|最高|最长|最快|最好|最贵|最老)的{n}是(什么|哪个|谁)？", "(写|帮我写|给我写|请写|来)(一首|一篇|一个|一段|一封)(诗|歌|作文|程序|代码|信|邮件|文章|笑话|函数|论文|菜谱)(|，关于{n})(。|)",
    "(把|请把)(这句话|{n}|这段文字)(翻译成|译成)(英文|法文|中文|日文)。", "“{n}”(用英语|用法语|英文)怎么说？", "(今天|明天|现在|{k})(天气|的天气)(怎么样|如何|好吗)？", "(现在|今天)(几点|星期几|几号|是哪年)(了|)？",
    "(给我|)(讲|说)(一个|个)笑话。", "(推荐|介绍)(一本|一部|一个|一家)(书|电影|{n}|餐厅)(。|给我。)", "我(应该|该|想)(吃|买|看|学|穿|去)(什么|哪里|什么{n})(？|呢？)", "从{k}到{w}(多远|有多远|怎么走|要多久)？",
    "{n}(和|与){o}(有什么区别|哪个好|有什么关系|哪个更大)？", "你(喜欢|爱|知道|见过|吃过|想要|相信){n}吗？", "{x}的首都是哪里？", "{x}在哪里？", "(告诉我|说说)(关于|){n}的(知识|历史|故事以外的事|情况)。",
    "(人生|生命|{n})的意义是什么？", "(如果|要是)(没有|有){n}(会怎样|会怎么样|怎么办)？", "{n}", "我(想|要|得)(买|卖|找|去|学|看){n}。", "{n}(有|吃|用|怕|会)(什么|哪些)？", "{n}有几(个|种|条)(|{o})？",
    "(唱|放|播放|打开|关上|画|订)(一首|一个|)(歌|{n})。", "(计算|解释|证明|分析)(量子力学|相对论|{n}|这个问题)。", "(地球|太阳|月亮|宇宙|{n})(有多大|有多远|有多热|多少岁)？",
    "(写|作|编)(一首|一篇|一份)(关于|){n}的(诗|报告|计划|歌)。",
    "我的{n}(坏了|丢了|不见了|不动了)(，怎么办|)？",
    "(帮我|请|能|)(修|画|设计|预订|打开|分析)(一下|一个|){n}(吗？|。|)",
    "{w}(最|哪里)(好玩|有名|好吃|漂亮)(的是什么|的地方是哪里|)？",
    "(人们|大家|我们)为什么(要|不|会|爱){n}？",
    "{n}(比|和){o}(好|大|贵)(在哪|多少|)(？|吗？)",
    "{w}的({n}|学校|公司|医院|球队)(有哪些|在哪里|叫什么|好不好)？",
    "(证明|说明|讨论|比较){n}(和|与|比){o}(。|好。|)"]
QUESTIONS["unknown"], QUESTIONS["unknown_zh"] = UNKNOWN, UNKNOWN_ZH
