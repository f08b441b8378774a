package ownership

// Mutation is a rule to be broken on purpose, so that the tests can show that they would notice. The zero value breaks
// none, and nothing but tests sets another.
type Mutation uint8

// The mutations of the core.
const (
	DecideWithoutToken Mutation = 1 + iota // decide wherever the ring says so, without a claim
	DropOnMove                             // hand a partition over without the last changes
	ReuseTerm                              // claim under the highest known term in place of a higher one
	LeaseFromReceipt                       // count a lease from the arrival of the voters' answers
	ShortRecord                            // a voter's record lives for T·(1+2ρ)
	CountAnySupport                        // rule 1 left out: a voter's answer supports every partition of the node
	RenewUnchecked                         // rule 2 left out: a renewal is granted whatever the voter has recorded
	AcceptAnyRelease                       // rule 3 left out: a proof of release need not name the recorded holder
	ForgetTerms                            // rule 4 left out: a voter that restarted begins with nothing recorded
	VoteAtOnce                             // rule 5 left out: a voter that restarted does not abstain
	UnguardedAtWill                        // strict answers without a copy do not wait for the voters to record that
)
