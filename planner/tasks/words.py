"""Word lists for the two-word keys: common, concrete words, so that most are one token in most vocabularies.

The lists mix words that a vocabulary of a few thousand entries holds whole with words that it has to spell out, so
that a model trained on these keys also learns to match keys of several tokens.
"""

FIRST_WORDS: tuple[str, ...] = tuple(
    """
able above active actual after again amber ancient arctic atomic autumn azure back bare base binary bitter blank blue
body bold brave bright broken bronze brown builtin busy byte call calm careful case check cheerful child chunk clean
clear clever client close cloudy code coastal cold color comment common compact complete config constant content
context cookie copper coral correct count crash cream crimson crystal curious current custom damp dark data date
decimal deep default desert direct distant domain double dry dusty early eager earth echo electric element elder
emerald empty encoded entry equal error even event every exact example expected extra fair false famous fast few field
file final first flag flat float foggy follow forest format formal frame fresh frosty full future gentle given giant
global golden grand granite gray green hand happy hash header heavy hidden high hollow honest host humble icy image
index indigo initial inner input instance integer internal invalid iron item ivory jade jolly just keen kind label large
last late lazy least left legal level light limit line link list literal little lively local lock logger long loop
lucky lunar main major many mapping marble master match mean mellow member memory message method mild mirror misty mock
mode modern module mossy multi mystic name narrow native neat needed negative new next nimble noble node normal north
number object odd offset old once only open optional orange order original other outer output over package pair pale
parent part past patient pattern pearl pink pipe plain platform point polar polite port positive possible present
previous private process proper proud public purple quick quiet random range rapid rare raw real recent record red
regular relative required rich right rigid rising robust root rosy rough round royal ruby running rural rusty same
sandy scarlet second secret select separate serene server shadow shared sharp short shiny signal silent silver simple
single skip sleepy slow small smooth snowy socket soft solar solid some sorted source space spare special spiral spring
stable stack standard starry start static steady steep still stone stormy stream strict string strong subtle success
sudden summer sunny super supported sure swift system table tall target task temporary tender test text thick thin
thread tidy time tiny token total trace tree true turtle type under unicode upper urban used user usual valid value
vast velvet violet vivid walnut want warm watch weak west white whole wide wild window winter wise wooden work write
yellow young zero
""".split()  # noqa: SIM905
)

SECOND_WORDS: tuple[str, ...] = tuple(
    """
acorn action actor address anchor anvil apple archive argument arrow array atlas audio author badger bamboo banner
barrel base basket beacon beaver bell bench bind bird block board boat body bottle boulder bound branch break brick
bridge brook brush bucket buffer button byte cabin cache cactus call camera candle canoe canvas canyon card carpet case
castle catch cedar chain chair change channel chapter char check cherry chest child chunk circle class cliff clock
close cloud clover code coin color column comet command comment common compass connect content cookie copy corner
cottage count cradle crane crash creek cricket crown current curtain daisy data date debug decimal desk dialog digest
dirs dish display dolphin domain door double down dragon drawer drum duck dummy dust eagle echo edge element ember
engine enter entry error event example exit expression extension eyes face factory failure falcon feather fence fern
ferry field file filter finch find fish flag flame flask float flow flute font forest fork form format fountain fox
frame from function garden gate gather ghost glacier glass globe glove grape gram grid ground group hammer hand handle
harbor harp hash hawk hazel head header heart height hello help here heron hill history home honey hook horizon horse
host hour house icon image index input insert instance island item ivy jacket jaguar join journal jump jungle kernel
kettle keyboard kite kitten ladder lagoon lake lamp lantern lark leaf lemon length lens level library light like
limit line link lion list live loader lobster local lock log look loop lotus machinery magnet mail main manager
mango maple mark market mask match maze meadow member memory menu message meta method mill mint mirror mode module
monkey month moon morning moss mountain move museum name napkin nebula needle nest network nickel night node notebook
number object ocean office offset olive open option orbit orchard order origin otter output owl oyster package page
paint pair palace panda panel paper parent parrot part party path pattern payload peach peak pebble pencil pepper
person pickle pilot pine pipe pixel place planet plate platform plum pocket point policy pond pony port post prefix
present prism process project puppet python quarry queen quest queue quilt rabbit race radio rain random range raven
reader record reef region register release request response result ribbon ride right ring river road robin rocket
root rose roundtrip route sail sample school scope screen script search season second section seed select server shape
shell shelf ship short shutter sibling signal skip slash sleep slice snow sock socket song source space spam sparrow
spear spider split spoon spring stack stamp star state station status stone store storm stream street string style
suffix suite sugar sun swan switch symbol system table tail target task temple tent text theme thing thread throne
thunder ticket tiger time token tools total tower town trace track train transport tree trip trumpet tunnel turn
turtle type value valley vent version vessel view village violin voice wagon wait wall walnut warning watch water wave
whale wheel widget willow wind window wing wolf word work world wrap writer year yarn zebra zone
""".split()  # noqa: SIM905
)
