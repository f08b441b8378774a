package replica

import (
	"go/ast"
	"go/parser"
	"go/token"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/weirlimit/weir/cluster/ownership"
	peerv1 "github.com/weirlimit/weir/proto/weir/peer/v1"
)

// coreMessages has one message of each type.
func coreMessages() []ownership.Message {
	return []ownership.Message{
		&ownership.Query{}, &ownership.QueryReply{}, &ownership.Entrust{}, &ownership.Offer{}, &ownership.OfferReply{},
		&ownership.Replicate{}, &ownership.ReplicateAck{}, &ownership.Commit{}, &ownership.CommitAck{}, &ownership.Forget{},
		&ownership.GrantRequest{}, &ownership.GrantReply{}, &ownership.ReadRecords{}, &ownership.Records{},
	}
}

// messageTypes returns the names of the types that package ownership declares to be messages.
func messageTypes(t *testing.T) []string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "../../cluster/ownership/message.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv != nil && fn.Name.Name == "message" {
			names = append(names, fn.Recv.List[0].Type.(*ast.StarExpr).X.(*ast.Ident).Name)
		}
	}
	return slices.Sorted(slices.Values(names))
}

func TestEveryMessageIsCarried(t *testing.T) {
	var have []string
	for _, m := range coreMessages() {
		have = append(have, reflect.TypeOf(m).Elem().Name())
	}
	slices.Sort(have)
	if want := messageTypes(t); !slices.Equal(have, want) {
		t.Errorf("these tests know %v, package ownership has %v", have, want)
	}
	var known []string
	bodies := (&peerv1.Message{}).ProtoReflect().Descriptor().Oneofs().ByName("body").Fields()
	for i := range bodies.Len() {
		if m := bodies.Get(i).Message(); m != nil { // otherwise it is packed
			known = append(known, string(m.Name()))
		}
	}
	if slices.Sort(known); !slices.Equal(have, known) {
		t.Errorf("ownership.proto has %v, package ownership %v", known, have)
	}
}

const testPartitions = 7

// fillMessage sets every field of a message, at any depth, to something valid that is not its zero value; unless
// sparse, in which case it leaves some out. A field that a conversion forgets, also one that is yet to be added, comes back as
// zero.
func fillMessage(rng *rand.Rand, v reflect.Value, sparse bool) {
	switch to := v.Addr().Interface().(type) {
	case *time.Duration:
		*to = 1 + time.Duration(rng.Int64N(int64(maxWait)))
		return
	case *ownership.Verdict:
		*to = 1 + ownership.Verdict(rng.UintN(uint(ownership.Refused)))
		return
	case *ownership.Outcome:
		*to = 1 + ownership.Outcome(rng.UintN(uint(ownership.Conflict)))
		return
	case *ownership.Node:
		if !sparse || rng.IntN(3) > 0 {
			*to = ownership.Node{Name: strings.Repeat("n", 1+rng.IntN(ownership.MaxName)), Boot: rng.Uint64() | 1}
		}
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fillMessage(rng, v.Field(i), sparse)
		}
		if r, ok := v.Addr().Interface().(*ownership.Replicate); ok {
			r.Parts = 2 + rng.IntN(maxParts-1)
			r.Part = 1 + rng.IntN(r.Parts-1)
		}
		return
	case reflect.Slice:
		n := 1 + rng.IntN(testPartitions)
		if sparse {
			n = rng.IntN(2)
		}
		if n == 0 {
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fillMessage(rng, v.Index(i), sparse)
		}
		return
	}
	if sparse && rng.IntN(3) == 0 {
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt(1 + rng.Int64N(testPartitions-1))
	case reflect.Uint64, reflect.Uint32, reflect.Uint8:
		v.SetUint(1 + rng.Uint64N(math.MaxUint64>>(64-v.Type().Bits())))
	default:
		panic("a kind of field that these tests do not know: " + v.Type().String())
	}
}

// carryMessage returns what arrives of a message.
func carryMessage(t *testing.T, m ownership.Message) (got ownership.Message, length int) {
	t.Helper()
	data, err := proto.Marshal(protoMessage(m))
	if err != nil {
		t.Fatal(err)
	}
	var p peerv1.Message
	if err := proto.Unmarshal(data, &p); err != nil {
		t.Fatal(err)
	}
	r := messageReader{partitions: testPartitions}
	got, err = r.read(&p)
	if err != nil {
		t.Fatalf("%+v: %v", m, err)
	}
	return got, len(data)
}

func TestMessagesRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		for _, m := range coreMessages() {
			sparse := rng.IntN(2) == 0
			fillMessage(rng, reflect.ValueOf(m).Elem(), sparse)
			got, length := carryMessage(t, m)
			if !reflect.DeepEqual(got, m) {
				t.Fatalf("sent    %+v\narrived %+v", m, got)
			}
			if length > ownership.Weight(m) {
				t.Fatalf("%T has %d bytes and a weight of %d", m, length, ownership.Weight(m))
			}
		}
	}
}

// TestWeightIsEnough: a frame is filled by weight, and must not be larger than a peer takes.
func TestWeightIsEnough(t *testing.T) {
	long := ownership.Node{Name: strings.Repeat("n", ownership.MaxName), Boot: math.MaxUint64}
	high := ownership.Term{Epoch: math.MaxUint64, N: math.MaxUint64}
	const most = math.MaxInt32
	rep := ownership.Replicate{
		Partition: most, Term: high, Sequence: math.MaxUint64, Begin: true, Complete: true, Part: most, Parts: most,
		Chunk: make([]byte, 1<<20), Sum: math.MaxUint32,
	}
	record := ownership.Record{Partition: most, Term: high, Node: long, Backup: long}
	for _, m := range []ownership.Message{
		&ownership.Query{ID: math.MaxUint64, Partitions: slices.Repeat([]int{most}, 1000)},
		&ownership.QueryReply{ID: math.MaxUint64, Infos: slices.Repeat([]ownership.Info{
			{Partition: most, Held: true, Claiming: true, Term: high, Holder: long, Copy: ownership.Position{Term: high, Sequence: math.MaxUint64}},
		}, 1000)},
		&rep,
		&ownership.ReplicateAck{Partition: most, Term: high, Sequence: math.MaxUint64, Outcome: 255, Known: high, Holder: long},
		&ownership.Commit{Replicate: rep, Known: high, Release: long, Merge: true, Granted: true},
		&ownership.CommitAck{Partition: most, Term: high, Outcome: 255, New: high, Keep: true, Sequence: math.MaxUint64, Known: high, Holder: long},
		&ownership.GrantRequest{ID: math.MaxUint64, Items: slices.Repeat([]ownership.GrantItem{
			{Partition: most, Term: high, Backup: long, Release: ownership.Release{Node: long, Term: high}},
		}, 1000)},
		&ownership.GrantReply{ID: math.MaxUint64, Epoch: math.MaxUint64, Items: slices.Repeat([]ownership.GrantAnswer{
			{Partition: most, Term: high, Granted: true, Recorded: record, Wait: math.MaxInt64},
		}, 1000)},
		&ownership.Records{ID: math.MaxUint64, Read: true, Epoch: math.MaxUint64, Records: slices.Repeat([]ownership.Record{record}, 1000)},
	} {
		if n := proto.Size(protoMessage(m)); n > ownership.Weight(m) {
			t.Errorf("%T has %d bytes and a weight of %d", m, n, ownership.Weight(m))
		}
	}
}

func TestMessagesRefused(t *testing.T) {
	deep := func(change func(*peerv1.Replicate)) *peerv1.Replicate {
		r := &peerv1.Replicate{Partition: 1, Parts: 1}
		change(r)
		return r
	}
	replicate := func(change func(*peerv1.Replicate)) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_Replicate{Replicate: deep(change)}}
	}
	grants := func(a *peerv1.GrantAnswer) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_GrantReply{GrantReply: &peerv1.GrantReply{Items: []*peerv1.GrantAnswer{{}, a}}}}
	}
	asks := func(i *peerv1.GrantItem) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_GrantRequest{GrantRequest: &peerv1.GrantRequest{Items: []*peerv1.GrantItem{i}}}}
	}
	records := func(r ...*peerv1.Record) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_Records{Records: &peerv1.Records{Records: r}}}
	}
	infos := func(i ...*peerv1.Info) *peerv1.Message {
		return &peerv1.Message{Body: &peerv1.Message_QueryReply{QueryReply: &peerv1.QueryReply{Infos: i}}}
	}
	long := &peerv1.Node{Name: strings.Repeat("n", ownership.MaxName+1)}
	nameless := &peerv1.Node{Boot: 1}
	for want, m := range map[string]*peerv1.Message{
		"body": {},
		"query.partitions: 7 is not one of 7 partitions": {Body: &peerv1.Message_Query{Query: &peerv1.Query{Partitions: []uint32{6, 7}}}},
		"query.partitions: 8 items":                      {Body: &peerv1.Message_Query{Query: &peerv1.Query{Partitions: make([]uint32, 8)}}},
		"query_reply.infos: 8 items":                     infos(make([]*peerv1.Info, 8)...),
		"info.partition":                                 infos(&peerv1.Info{Partition: 7}),
		"info.holder":                                    infos(&peerv1.Info{Holder: nameless}),
		"entrust.partition":                              {Body: &peerv1.Message_Entrust{Entrust: &peerv1.Entrust{Partition: math.MaxUint32}}},
		"offer.partition":                                {Body: &peerv1.Message_Offer{Offer: &peerv1.Offer{Partition: 7}}},
		"offer_reply.verdict: 0":                         {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{}}},
		"offer_reply.verdict: 4":                         {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{Verdict: 4}}},
		"offer_reply.verdict: 257":                       {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{Verdict: 257}}},
		"offer_reply.partition":                          {Body: &peerv1.Message_OfferReply{OfferReply: &peerv1.OfferReply{Verdict: 1, Partition: 7}}},
		"replicate.partition":                            replicate(func(r *peerv1.Replicate) { r.Partition = 7 }),
		"replicate.parts: must be 1 to 4096, not 0":      replicate(func(r *peerv1.Replicate) { r.Parts = 0 }),
		"replicate.parts: must be 1 to 4096, not 4097":   replicate(func(r *peerv1.Replicate) { r.Parts = 4097 }),
		"replicate.part: 1 is not one of 1":              replicate(func(r *peerv1.Replicate) { r.Part = 1 }),
		"replicate.chunk: holds 2097153 bytes":           replicate(func(r *peerv1.Replicate) { r.Chunk = make([]byte, maxWeight+1) }),
		"replicate_ack.partition":                        {Body: &peerv1.Message_ReplicateAck{ReplicateAck: &peerv1.ReplicateAck{Partition: 7, Outcome: 1}}},
		"replicate_ack.outcome: 6":                       {Body: &peerv1.Message_ReplicateAck{ReplicateAck: &peerv1.ReplicateAck{Outcome: 6}}},
		"replicate_ack.outcome: -1":                      {Body: &peerv1.Message_ReplicateAck{ReplicateAck: &peerv1.ReplicateAck{Outcome: -1}}},
		"replicate_ack.holder":                           {Body: &peerv1.Message_ReplicateAck{ReplicateAck: &peerv1.ReplicateAck{Outcome: 1, Holder: long}}},
		"replicate.parts: must be 1 to 4096, not 0 ":     {Body: &peerv1.Message_Commit{Commit: &peerv1.Commit{}}},
		"commit.release":                                 {Body: &peerv1.Message_Commit{Commit: &peerv1.Commit{Changes: deep(func(*peerv1.Replicate) {}), Release: long}}},
		"forget.partition":                               {Body: &peerv1.Message_Forget{Forget: &peerv1.Forget{Partition: 7}}},
		"commit_ack.partition":                           {Body: &peerv1.Message_CommitAck{CommitAck: &peerv1.CommitAck{Partition: 7, Outcome: 1}}},
		"commit_ack.outcome: 0":                          {Body: &peerv1.Message_CommitAck{CommitAck: &peerv1.CommitAck{}}},
		"commit_ack.holder":                              {Body: &peerv1.Message_CommitAck{CommitAck: &peerv1.CommitAck{Outcome: 1, Holder: nameless}}},
		"grant_request.items: 8 items":                   {Body: &peerv1.Message_GrantRequest{GrantRequest: &peerv1.GrantRequest{Items: make([]*peerv1.GrantItem, 8)}}},
		"grant_item.partition":                           asks(&peerv1.GrantItem{Partition: 7}),
		"grant_item.backup":                              asks(&peerv1.GrantItem{Backup: nameless}),
		"grant_item.release.node":                        asks(&peerv1.GrantItem{Release: &peerv1.Release{Node: long}}),
		"grant_reply.items: 8 items":                     {Body: &peerv1.Message_GrantReply{GrantReply: &peerv1.GrantReply{Items: make([]*peerv1.GrantAnswer, 8)}}},
		"grant_answer.partition":                         grants(&peerv1.GrantAnswer{Partition: 7}),
		"grant_answer.wait_ns: 1h0m0.000000001s is more": grants(&peerv1.GrantAnswer{WaitNs: uint64(maxWait) + 1}),
		"grant_answer.wait_ns: 2562047h47m16.854775807s": grants(&peerv1.GrantAnswer{WaitNs: math.MaxUint64}),
		"record.partition":                               grants(&peerv1.GrantAnswer{Recorded: &peerv1.Record{Partition: 7}}),
		"records.records: 15 items":                      records(make([]*peerv1.Record, 15)...),
		"record.node":                                    records(&peerv1.Record{Node: long}),
		"record.backup":                                  records(&peerv1.Record{}, &peerv1.Record{Backup: nameless}),
	} {
		r := messageReader{partitions: testPartitions}
		got, err := r.read(m)
		if err == nil || got != nil || !strings.HasPrefix(err.Error(), strings.TrimSpace(want)) {
			t.Errorf("want %q: got %+v, %v", want, got, err)
		}
		// A reader is used again after a mistake.
		if _, err := r.read(replicate(func(*peerv1.Replicate) {})); err != nil {
			t.Errorf("after %q: %v", want, err)
		}
	}
}

// checkMessage fails when a message has something in it that could be a mistake of a reader: it walks all of it.
func checkMessage(t *testing.T, path string, v reflect.Value) {
	t.Helper()
	switch x := v.Interface().(type) {
	case ownership.Verdict:
		if x < ownership.Accepted || x > ownership.Refused {
			t.Errorf("%s: %v", path, x)
		}
		return
	case ownership.Outcome:
		if x < ownership.Done || x > ownership.Conflict {
			t.Errorf("%s: %v", path, x)
		}
		return
	case time.Duration:
		if x < 0 || x > maxWait {
			t.Errorf("%s: %v", path, x)
		}
		return
	case []byte:
		return
	case ownership.Replicate:
		if x.Part < 0 || x.Part >= x.Parts || x.Parts > maxParts || len(x.Chunk) > maxWeight {
			t.Errorf("%s: %+v", path, x)
		}
		checkMessage(t, path+".Partition", reflect.ValueOf(x.Partition))
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		checkMessage(t, path, v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			checkMessage(t, path+"."+v.Type().Field(i).Name, v.Field(i))
		}
	case reflect.Slice:
		if v.Len() > testPartitions {
			t.Errorf("%s: %d items", path, v.Len())
		}
		for i := range v.Len() {
			checkMessage(t, path, v.Index(i))
		}
	case reflect.Int: // a partition: there is no other
		if v.Int() < 0 || v.Int() >= testPartitions {
			t.Errorf("%s: %d", path, v.Int())
		}
	case reflect.String:
		if v.Len() > ownership.MaxName {
			t.Errorf("%s: %d bytes", path, v.Len())
		}
	}
}

// FuzzMessage: whatever arrives is refused, or is a message within all bounds that arrives unchanged once more.
func FuzzMessage(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, m := range coreMessages() {
		fillMessage(rng, reflect.ValueOf(m).Elem(), false)
		data, err := proto.Marshal(protoMessage(m))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var p peerv1.Message
		if err := proto.Unmarshal(data, &p); err != nil {
			return
		}
		r := messageReader{partitions: testPartitions}
		m, err := r.read(&p)
		if err != nil {
			return
		}
		checkMessage(t, "message", reflect.ValueOf(m))
		if again, _ := carryMessage(t, m); !reflect.DeepEqual(again, m) {
			t.Errorf("sent    %+v\narrived %+v", m, again)
		}
	})
}

// TestMostRecords: a voter tells of every partition two records, and any outcome is told.
func TestMostRecords(t *testing.T) {
	r := messageReader{partitions: 7}
	for n, ok := range map[int]bool{14: true, 15: false} {
		if _, err := r.read(protoMessage(&ownership.Records{Records: make([]ownership.Record, n)})); (err == nil) != ok {
			t.Errorf("%d records of 7 partitions: %v", n, err)
		}
	}
	for o := ownership.Done; o <= ownership.Full; o++ {
		if _, err := r.read(protoMessage(&ownership.ReplicateAck{Outcome: o})); err != nil {
			t.Errorf("outcome %d: %v", o, err)
		}
	}
}
