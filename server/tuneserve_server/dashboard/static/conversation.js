// A conversation with one model or two: its turns, and the requests that continue it.

// The body and the path of a request for the answer of `who` (chosen or base) to the last turn.
// A turn is { user, answers: { chosen, base } }; each model sees its own answers.
export function requestOf(turns, who, { model, isChat, system, maxTokens, temperature, topP }) {
  const shared = {
    model,
    max_tokens: maxTokens,
    temperature,
    top_p: topP,
    stream: true,
    stream_options: { include_usage: true },
  };
  const last = turns.at(-1);
  if (!isChat) {
    return ["v1/completions", { ...shared, prompt: last.user }];
  }
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { user, answers } of turns.slice(0, -1)) {
    const answer = answers[who] ?? answers.chosen;
    if (answer) {
      messages.push({ role: "user", content: user }, { role: "assistant", content: answer });
    }
  }
  messages.push({ role: "user", content: last.user });
  return ["v1/chat/completions", { ...shared, separate_reasoning: false, messages }];
}

// Reads a stream of pieces: calls `onText` with each text, and returns { tokens, reason }.
export async function readAnswer(events, onText) {
  let tokens = 0;
  let reason = "";
  for await (const event of events) {
    if (event.data === "[DONE]") {
      break;
    }
    const piece = JSON.parse(event.data);
    if (piece.error) {
      throw new Error(piece.error.message);
    }
    tokens = piece.usage?.completion_tokens ?? tokens;
    const choice = piece.choices[0];
    onText(choice?.text ?? choice?.delta?.content ?? "");
    reason = choice?.finish_reason ?? reason;
  }
  return { tokens, reason };
}
