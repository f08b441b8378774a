package simulation

import (
	"os"
	"slices"
	"testing"

	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/checker"
)

// mutants are the rules that are broken on purpose, one at a time, and what is to notice: a rule of the checker, in a
// scenario or in one of the seeds of some kinds of weather.
var mutants = []struct {
	name     string
	mutant   mutant
	noticed  []string
	scenario string
	weather  []weather
	first    uint64 // a seed that is known to notice: it is only tried before the others
}{
	{"decide without a token", mutant{core: ownership.DecideWithoutToken}, []string{checker.NoToken}, "", []weather{fair, moving, crashing}, 1},
	{"a move drops what changed last", mutant{core: ownership.DropOnMove}, []string{checker.Beyond}, "", []weather{moving}, 37},
	{"a term is used twice", mutant{core: ownership.ReuseTerm}, []string{checker.TermReused}, "", []weather{moving, crashing, voting}, 1},
	{"a lease counts from receipt", mutant{core: ownership.LeaseFromReceipt}, []string{checker.OneGrant}, "lease_end", nil, 0},
	{"a record is kept for 1+2ρ", mutant{core: ownership.ShortRecord}, []string{checker.OneGrant}, "record_end", nil, 0},
	{"rule 1: any support counts", mutant{core: ownership.CountAnySupport}, []string{checker.OneGrant}, "", []weather{cutting, pausing, doubting}, 3},
	{"rule 2: renewals are not checked", mutant{core: ownership.RenewUnchecked}, []string{checker.OneGrant}, "", []weather{cutting, pausing, doubting}, 3},
	{"rule 3: any proof of release will do", mutant{core: ownership.AcceptAnyRelease}, []string{checker.OneGrant}, "release", nil, 0},
	{"rule 4: voters forget terms", mutant{core: ownership.ForgetTerms}, []string{checker.Beyond}, "voter_forgets", nil, 0},
	{"rule 5: voters do not abstain", mutant{core: ownership.VoteAtOnce}, []string{checker.OneGrant}, "voters_at_once", nil, 0},
	{"no copy, and the voters do not know", mutant{core: ownership.UnguardedAtWill}, []string{checker.Beyond}, "", []weather{cutting, oneWay, pausing, doubting}, 3},
	{"a merge keeps the fuller side", mutant{rule: mergeByMaximum}, []string{checker.Forgotten}, "split", nil, 0},
	{"an escrow is dated at its grant", mutant{rule: escrowAged}, []string{checker.Beyond}, "escrow_dated", nil, 0},
	{"an answer is used past its lease", mutant{rule: usePastLease}, []string{checker.PastLease}, "late_answer", nil, 0},
	{"an answer does not wait for the copy", mutant{rule: forgetTickets}, []string{checker.Beyond}, "ticket", nil, 0},
}

// TestMutants breaks each rule and wants a run to fail that succeeds with the rule kept.
func TestMutants(t *testing.T) {
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			notices := func(vs []checker.Violation) bool {
				return slices.ContainsFunc(vs, func(v checker.Violation) bool {
					if slices.Contains(m.noticed, v.Rule) {
						t.Log(v)
						return true
					}
					return false
				})
			}
			if m.scenario != "" {
				text, err := os.ReadFile("testdata/" + m.scenario + ".txt")
				if err != nil {
					t.Fatal(err)
				}
				if vs := enact(t, string(text), mutant{}); len(vs) > 0 {
					t.Errorf("%s fails with the rule kept: %v", m.scenario, vs)
				}
				if vs := enact(t, string(text), m.mutant); !notices(vs) {
					t.Errorf("%s does not notice; it has %v", m.scenario, vs)
				}
				return
			}
			const enough = 300
			for n := range uint64(enough) {
				seed := m.first
				if n > 0 {
					seed = (n-1)/uint64(len(m.weather))*uint64(weathers) + uint64(m.weather[(n-1)%uint64(len(m.weather))])
				}
				if notices(play(seed, m.mutant, false).violations()) && len(play(seed, mutant{}, false).violations()) == 0 {
					t.Logf("seed %d, the %d. that was tried", seed, n+1)
					return
				}
			}
			t.Errorf("%d seeds do not notice", enough)
		})
	}
}

func enact(t *testing.T, text string, m mutant) []checker.Violation {
	s := &scenario{t: t}
	s.play(text, m)
	return s.violations()
}
