package clustertest

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/weirlimit/weir/client"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// A borrower is a process of its own, this test's binary, whose Go clients ask about keys all the time and borrow units of those that
// they ask about often. What it asked and what came of it is in a file that it shares with the test, so that nothing of that is lost
// when it is killed. Instants are those of the machine's monotonic clock, which all processes read alike.

// borrowerCommand is the argument that makes this binary a borrower.
const borrowerCommand = "borrow"

// borrowerPlan says what a borrower asks.
type borrowerPlan struct {
	Address  string
	Policies []string
	Clients  int   // of one process, each a borrower to the nodes
	Rate     int   // questions of each client in a second
	Origin   int64 // when key 0 came up
	Every    int64 // after which time the next key comes up; 0: all of Keys are there from the beginning
	Keys     int   // how many are asked about, the newest ones
	Newest   int   // the share of the questions that are about the newest one, in percent
	Records  string
}

// maxQuestions is how many questions of a borrower are recorded; it ends before it asks more.
const maxQuestions = 1 << 19

// question is a record in the file. Sent is written before the question is asked, the rest when it has been answered.
type question struct {
	Sent, Answered int64
	Policy, Key    uint16
	Result         uint8
	Degraded       bool
	_              [2]byte
}

const questionSize = int(unsafe.Sizeof(question{}))

// monotonic reads the machine's monotonic clock.
func monotonic() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // there is no Linux without it
	}
	return t.Nano()
}

// questions maps a file of records into memory, until unmap is called.
func questions(file *os.File) (records []question, unmap func(), err error) {
	data, err := unix.Mmap(int(file.Fd()), 0, maxQuestions*questionSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, err
	}
	unmap = func() { _ = unix.Munmap(data) } // which it is
	return unsafe.Slice((*question)(unsafe.Pointer(&data[0])), maxQuestions), unmap, nil
}

// runBorrower is the borrower's process. It ends in good order when its standard input does.
func runBorrower(text string) error {
	var plan borrowerPlan
	if err := json.Unmarshal([]byte(text), &plan); err != nil {
		return err
	}
	file, err := os.OpenFile(plan.Records, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	records, _, err := questions(file) // until the process ends
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var next atomic.Int64
	var asking sync.WaitGroup
	for range plan.Clients {
		c, err := client.Dial(ctx, plan.Address, client.WithOnError(client.FailClosed), client.WithTimeout(2*time.Second))
		if err != nil {
			return err
		}
		defer c.Close()
		if err := c.Ready(ctx); err != nil {
			return err
		}
		limiters := make([]*client.Limiter, len(plan.Policies))
		for i, name := range plan.Policies {
			limiters[i] = c.Policy(name)
		}
		const askers = 4
		for range askers {
			asking.Go(func() {
				const pause = 2 * time.Millisecond
				tick := time.NewTicker(pause)
				defer tick.Stop()
				each := float64(plan.Rate) / askers * pause.Seconds()
				for due := rand.Float64(); ; due += each {
					select {
					case <-tick.C:
					case <-ctx.Done():
						return
					}
					for ; due >= 1; due-- {
						at := next.Add(1) - 1
						if at >= maxQuestions {
							return
						}
						plan.ask(ctx, limiters, &records[at])
					}
				}
			})
		}
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	cancel()
	asking.Wait()
	return err
}

// ask asks one question and records it.
func (plan *borrowerPlan) ask(ctx context.Context, limiters []*client.Limiter, q *question) {
	which, key := rand.IntN(len(limiters)), rand.IntN(plan.Keys)
	if plan.Every > 0 {
		if key = 0; rand.IntN(100) >= plan.Newest {
			key = rand.IntN(plan.Keys)
		}
		key = max(int((monotonic()-plan.Origin)/plan.Every)-key, 0)
	}
	q.Policy, q.Key = uint16(which), uint16(key)
	atomic.StoreInt64(&q.Sent, monotonic())
	d, err := limiters[which].Allow(ctx, keyNamed(key))
	switch {
	case err != nil || d.FailedClosed || d.FailedOpen:
		q.Result = uint8(checker.Failed)
	case d.Allowed:
		q.Result = uint8(checker.Admitted)
	default:
		q.Result = uint8(checker.Refused)
	}
	q.Degraded = d.Degraded
	atomic.StoreInt64(&q.Answered, monotonic())
}

// borrower is a borrower's process as the test sees it.
type borrower struct {
	t       *testing.T
	plan    borrowerPlan
	cmd     *exec.Cmd
	stdin   io.Closer
	done    chan struct{}
	records []question
}

// startBorrower starts one and waits until its clients are ready. It ends when the test does, if not before.
func startBorrower(t *testing.T, wrapper []string, plan borrowerPlan) *borrower {
	t.Helper()
	plan.Records = filepath.Join(t.TempDir(), "records")
	file := must.Value(os.Create(plan.Records))(t)
	defer file.Close()
	must.NoError(t, file.Truncate(int64(maxQuestions*questionSize)))
	b := &borrower{t: t, plan: plan, done: make(chan struct{})}
	records, unmap, err := questions(file)
	must.NoError(t, err)
	b.records = records
	t.Cleanup(unmap)
	text := must.Value(json.Marshal(plan))(t)
	line := slices.Concat(wrapper, []string{must.Value(os.Executable())(t), borrowerCommand, string(text)})
	b.cmd = exec.Command(line[0], line[1:]...)
	b.cmd.Env = environment()
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var stdout, stderr testkit.Buffer
	b.cmd.Stdout, b.cmd.Stderr = &stdout, &stderr
	b.stdin = must.Value(b.cmd.StdinPipe())(t)
	must.NoError(t, b.cmd.Start())
	go func() {
		defer close(b.done)
		_ = b.cmd.Wait() // ProcessState says it all
	}()
	t.Cleanup(func() {
		_ = b.cmd.Process.Kill()
		<-b.done
		expect.True(t, !strings.Contains(stderr.String(), "panic:") && !strings.Contains(stderr.String(), "DATA RACE"),
			"a borrower failed")
		if t.Failed() {
			t.Logf("borrower (pid %d, %v) wrote:\n%s", b.cmd.Process.Pid, b.cmd.ProcessState, &stderr)
		}
	})
	eventually(t, startTimeout, "a borrower is ready", func() bool {
		select {
		case <-b.done:
			t.Fatalf("the borrower has ended: %v\n%s", b.cmd.ProcessState, &stderr)
		default:
		}
		return strings.Contains(stdout.String(), "ready")
	})
	return b
}

func (b *borrower) signal(s syscall.Signal) {
	b.t.Helper()
	must.NoError(b.t, b.cmd.Process.Signal(s))
}

// kill ends it without notice.
func (b *borrower) kill() {
	b.t.Helper()
	b.signal(syscall.SIGKILL)
	<-b.done
}

// end ends it in good order.
func (b *borrower) end() {
	b.t.Helper()
	b.stdin.Close()
	select {
	case <-b.done:
		expect.Equal(b.t, b.cmd.ProcessState.ExitCode(), 0, "a borrower's exit status")
	case <-time.After(stopTimeout):
		b.t.Fatalf("a borrower did not end within %v", stopTimeout)
	}
}

// operations are what it has been answered, on the clock of origin. What it was not answered it has not admitted.
func (b *borrower) operations(origin int64) (all []checker.Operation) {
	for i := range b.records {
		q := &b.records[i]
		if atomic.LoadInt64(&q.Answered) == 0 {
			continue
		}
		all = append(all, checker.Operation{
			Policy: b.plan.Policies[q.Policy], Key: keyNamed(int(q.Key)), Cost: 1, Sent: q.Sent - origin, Answered: q.Answered - origin,
			Result: checker.Result(q.Result), Degraded: q.Degraded,
		})
	}
	return all
}
